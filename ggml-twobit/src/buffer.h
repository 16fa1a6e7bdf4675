// buffer.h: the buffer type for weights that have a residual. It wraps the inner device's own buffer type and pairs tensors as they are loaded.
#pragma once

#include "ggml-backend-impl.h"

// The paired buffer type over `inner` (one for each inner type, made at first use, never freed). `device`: whose it is.
ggml_backend_buffer_type_t tb_paired_buft(ggml_backend_buffer_type_t inner, ggml_backend_dev_t device);

bool tb_is_paired_buft(ggml_backend_buffer_type_t buft);

// a paired buffer over memory that is already there (llama.cpp's mmap); CPU only
ggml_backend_buffer_t tb_paired_buffer_from_ptr(ggml_backend_buffer_type_t buft, void * ptr, size_t size);
