// mode.cpp: draft or full, for each thread.

#include "twobit.h"

#include <stdlib.h>
#include <string.h>

static int mode_of_new_threads() {
    const char * env = getenv("TWOBIT_MODE");
    return env && strcmp(env, "draft") == 0 ? TWOBIT_MODE_DRAFT : TWOBIT_MODE_FULL;
}

static thread_local int t_mode = mode_of_new_threads();

extern "C" int twobit_set_mode(int mode) {
    const int former = t_mode;
    t_mode = mode == TWOBIT_MODE_DRAFT ? TWOBIT_MODE_DRAFT : TWOBIT_MODE_FULL;
    return former;
}

extern "C" int twobit_get_mode(void) {
    return t_mode;
}
