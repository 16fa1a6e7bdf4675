// twobit.h: the public C interface of libggml-twobit.
//
// Python binds it with cffi, which reads this file as it is (lines that start with '#' are left out),
// so keep it plain C: no macros inside declarations, no inline functions.
//
// Every function that can fail returns 0 or a positive value on success and a negative value on failure;
// twobit_last_error() then holds one clear line. Nothing here throws or aborts.

#ifndef TWOBIT_H
#define TWOBIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef TWOBIT_BUILD
#    define TWOBIT_API __attribute__((visibility("default")))
#else
#    define TWOBIT_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// ---- errors ---------------------------------------------------------------------------------------------------------

// the last failure on this thread, one line without a newline; "" if there was none
TWOBIT_API const char * twobit_last_error(void);

// ---- mode -----------------------------------------------------------------------------------------------------------

enum twobit_mode {
    TWOBIT_MODE_DRAFT = 0, // the 2-bit base alone
    TWOBIT_MODE_FULL  = 1, // base + residual (the verifier)
};

// The mode is a property of the calling thread: set it immediately around each llama_decode, never across a yield.
// New threads start in full mode, or in draft mode when the environment has TWOBIT_MODE=draft. Returns the former mode.
TWOBIT_API int twobit_set_mode(int mode);
TWOBIT_API int twobit_get_mode(void);

// ---- where the residual is ------------------------------------------------------------------------------------------

enum twobit_attach_flags {
    TWOBIT_ATTACH_POPULATE  = 1, // read the residual into RAM now, not at first use
    TWOBIT_ATTACH_MLOCK     = 2, // keep it there (implies POPULATE)
    TWOBIT_ATTACH_NO_VERIFY = 4, // do not compare checksums (they are compared while a model loads)
};

// Says that the model about to be loaded from `model_path` has its residual there, or in `residual_path` if not NULL.
// Attaching is optional: without it the plugin looks into TWOBIT_MODEL and into the files the process has open.
// Call twobit_detach once the model is loaded: the mapping lives on as long as a loaded tensor uses it.
TWOBIT_API int twobit_attach(const char * model_path, const char * residual_path, int flags);
TWOBIT_API int twobit_detach(const char * model_path);

// number of devices added since the plugin was loaded (RPC servers, for example) that now have a TWOBITn of their own
TWOBIT_API int twobit_rescan_devices(void);

// ---- counters -------------------------------------------------------------------------------------------------------

struct twobit_counters {
    int64_t graphs_draft;     // graphs computed in draft mode
    int64_t graphs_full;      // graphs computed in full mode
    int64_t matmuls_paired;   // matmuls to which a residual was added
    int64_t matmuls_unpaired; // matmuls by a weight with a residual that was left out (draft mode)
    int64_t tokens_residual;  // sum over paired matmuls of their number of tokens
    int64_t slices;           // pieces that graphs on wrapped GPUs were cut into
    int64_t pairs_alive;      // weights that have a residual and are loaded now
    int64_t residual_bytes;   // bytes of residual mapped for them
};

TWOBIT_API void twobit_get_counters(struct twobit_counters * out);
TWOBIT_API void twobit_reset_counters(void); // all but pairs_alive and residual_bytes

// ---- codec: packed residuals (docs/format.md) -----------------------------------------------------------------------

// A residual format is named by its bits a weight: 4, 5, 6 or 8 (R4, R5, R6, R8).

// Bytes of `n_mats` packed matrices (rows, cols), one behind the other; negative if the format cannot hold the shape.
TWOBIT_API int64_t twobit_residual_nbytes(int bits, int64_t rows, int64_t cols, int64_t n_mats);

// Packs R = w - dequantise(base) for the rows [0, rows) of one matrix, or of a chunk of one that starts at a multiple
// of 32 rows. w: (rows, cols) f32; base: (rows, cols) in ggml type `base_type`, or NULL to pack w itself;
// factor: the tensor's f32 factor; importance: (cols) f32 weights of the columns' squared errors, or NULL.
TWOBIT_API int twobit_residual_encode(int bits, float factor, const float * w, int base_type, const void * base,
                                      int64_t rows, int64_t cols, const float * importance, void * dst);

// The factor for a tensor whose largest |w - b| is max_abs: a power of two (docs/format.md).
TWOBIT_API float twobit_residual_factor(int bits, float max_abs);

// The largest |w - dequantise(base)|; NaN or Inf in w gives a negative value.
TWOBIT_API float twobit_residual_max_abs(const float * w, int base_type, const void * base, int64_t rows, int64_t cols);

// dst: (rows, cols) f32 = the residual as the kernels see it
TWOBIT_API int twobit_residual_decode(int bits, float factor, const void * src, int64_t rows, int64_t cols, float * dst);

// y[t][row] += sum_k R[row][k] x[t][k] with activations rounded to int8, as the plugin computes it, on this thread.
// x: (n_tokens, cols) f32, y: (n_tokens, rows) f32; kernel: a name from twobit_kernel_name, or NULL for the best.
TWOBIT_API int twobit_residual_mul(int bits, float factor, const void * src, int64_t rows, int64_t cols,
                                   const float * x, int64_t n_tokens, float * y, const char * kernel);

// the kernel sets this CPU can run, best first ("avx512vnni", "avxvnni", "avx2", "neon", "scalar"); NULL behind the last
TWOBIT_API const char * twobit_kernel_name(int index);

// ---- codec: bases (stock ggml types) --------------------------------------------------------------------------------

// Quantises (rows, cols) f32 to ggml type `type` with ggml's own quantizers, except Q2_0, whose scale is searched.
// importance: (cols) f32; NULL: equal for all columns in 2-bit types (also in those ggml wants an importance matrix for), and
// what llama.cpp does without one in all others. Returns the bytes written or a negative value.
TWOBIT_API int64_t twobit_base_quantize(int type, const float * w, int64_t rows, int64_t cols, const float * importance,
                                        void * dst);
TWOBIT_API int     twobit_base_dequantize(int type, const void * src, int64_t rows, int64_t cols, float * dst);
TWOBIT_API int64_t twobit_base_nbytes(int type, int64_t rows, int64_t cols); // negative: the type cannot hold the shape

// ---- calibrated quantisation ----------------------------------------------------------------------------------------

// Rounding with error feedback (GPTQ, LDLQ; see src/gptq.h). The calibration of the matmul's input x, H = XᵀX made positive
// definite by damping, comes factorised: H = U·diag(d)·Uᵀ with U unit upper triangular. u: (cols, cols) f32, of which only what
// lies above the diagonal is read; d: (cols) f32, positive. Rows are rounded independently of each other, on the calling thread:
// a caller splits a matrix into chunks of rows (a multiple of 32) and runs them on threads of its own, with the same bytes.

// whether there is a method for this base type: Q2_0, Q2_K, IQ2_XS, Q3_K, Q4_K, Q4_0
TWOBIT_API bool    twobit_feedback_supports(int type);
// like twobit_base_quantize
TWOBIT_API int64_t twobit_base_quantize_feedback(int type, const float * w, int64_t rows, int64_t cols, const float * u,
                                                 const float * d, void * dst);
// whether twobit_base_sweep knows this base type: Q2_0, Q2_K, IQ2_XS
TWOBIT_API bool    twobit_sweep_supports(int type);
// Rounds a base anew, column by column, `sweeps` times, each column for the errors of all others (src/gptq_sweep.h). It only gains.
// h: (cols, cols) f32, the damped H itself; base: what twobit_base_quantize_feedback gave, changed in place.
TWOBIT_API int     twobit_base_sweep(int type, const float * w, int64_t rows, int64_t cols, const float * h, int sweeps, void * base);
// like twobit_residual_encode
TWOBIT_API int     twobit_residual_encode_feedback(int bits, float factor, const float * w, int base_type, const void * base,
                                                   int64_t rows, int64_t cols, const float * u, const float * d, void * dst);

// ---- speculation ----------------------------------------------------------------------------------------------------

struct twobit_candidate {
    int32_t token;
    float   p; // its probability
};

// The likely tokens of a row of n logits: at most `count` whose probability is at least p_min, best first, equal logits by token; the
// best one is always among them. Probabilities are those of the softmax, in which logits 12 below the best count as nothing (that is
// less than 1 % in all). Returns their number; 0 if the best logit is not finite. NaN is no candidate.
TWOBIT_API int twobit_top_candidates(const float * logits, int64_t n, int count, float p_min, struct twobit_candidate * out);

// ---- checksum -------------------------------------------------------------------------------------------------------

TWOBIT_API uint64_t twobit_xxh64(const void * data, size_t size); // XXH64, seed 0

#ifdef __cplusplus
}
#endif

#endif // TWOBIT_H
