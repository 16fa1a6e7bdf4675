// error.h: the calling thread's last failure, read by twobit_last_error.
#pragma once

// Records one line (printf style; cut at 511 characters) and returns -1, so that a failing function can `return tb_set_error(...)`.
int tb_set_error(const char * format, ...) __attribute__((format(printf, 1, 2)));
