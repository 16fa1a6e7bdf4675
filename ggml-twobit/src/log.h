// log.h: what the plugin says. Warnings and errors go to stderr themselves: a host that silences llama.cpp's log must still see them.
#pragma once

#include <stdio.h>

#include "ggml-impl.h"

#define TB_LOG_INFO(...)  GGML_LOG_INFO("twobit: " __VA_ARGS__)
#define TB_LOG_WARN(...)  fprintf(stderr, "twobit: warning: " __VA_ARGS__)
#define TB_LOG_ERROR(...) fprintf(stderr, "twobit: error: " __VA_ARGS__)
