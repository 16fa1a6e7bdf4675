// sources.h: finds the residual section that belongs to a model which is being loaded.
//
// ggml gives a backend tensors, not files. While llama.cpp loads a model it asks our device about every tensor; a section is then looked for
//   1. among those the host attached (twobit_attach),
//   2. in the file that the environment variable TWOBIT_MODEL names,
//   3. in the files that the process has open: llama.cpp keeps the GGUF open while it loads it.
// A section is tied to a tensor by name, shape, type and, before anything is computed, by the checksum of the tensor's bytes.
#pragma once

#include <memory>

#include "section.h"

// the residual for a base tensor of this name, type and shape; NULL if there is none. `section` keeps it alive.
const tb_residual * tb_sources_find(const struct ggml_tensor * base, std::shared_ptr<tb_section> & section);

// as above, but the one made for a base whose bytes have this checksum
const tb_residual * tb_sources_find_exact(const struct ggml_tensor * base, uint64_t base_xxh64, std::shared_ptr<tb_section> & section);

int tb_sources_attach(const char * model_path, const char * residual_path, int flags); // 0, or -1 with tb_set_error
int tb_sources_detach(const char * model_path);

// A context has been made: detaching from now on means that the load went well.
void tb_sources_context_made(void);

// The first graph is about to be computed, so loading is over: warns of models that have residuals which no device of ours holds, and lets go of
// sections that belong to files no longer open. Not when a context is made: llama-server first loads every model without its weights, to see
// what fits.
void tb_sources_loading_done(void);
