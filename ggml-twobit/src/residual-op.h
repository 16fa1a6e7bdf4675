// residual-op.h: y += R·x as nodes of a ggml graph on the CPU; y = B·x and y = B·x + R·x too, where the base has been repacked.
//
// A custom node has neither barrier nor scratch, so one product is up to three nodes, which ggml's own threads run one after the other:
//   route     (experts only, one task) sorts the tokens by the expert that is to see them
//   quantise  rounds x to int8; matmuls that share x share this node
//   multiply  adds R·x to the result of the base's matmul, or takes that matmul's place
#pragma once

#include <stdint.h>

#include <memory>
#include <vector>

#include "ggml.h"
#include "pairs.h"

// x of one or more matmuls, and its rows rounded to int8 in the order in which the matrices want them
struct tb_input {
    struct row { // where a row's product goes in y: the indices along ne[1], ne[2], ne[3]
        int32_t i1, i2, i3;
    };
    struct batch { // the rows that one matrix multiplies
        int64_t mat;
        int64_t first; // index into rows
        tb_acts acts;
    };

    const ggml_tensor * x;
    const ggml_tensor * ids; // MUL_MAT_ID: the matrices that each token goes to; NULL for MUL_MAT
    const char        * x_data;
    const char        * ids_data;
    int64_t             n_mats;
    uint8_t           * scratch;

    std::vector<row>           rows;
    std::vector<const float *> x_rows; // of each row
    std::vector<batch>         batches;
};

enum tb_terms {
    TB_ADD_RESIDUAL,          // y += R·x
    TB_BASE,                  // y  = B·x, by the repacked base
    TB_BASE_AND_RESIDUAL,     // y  = B·x + R·x, likewise
};

struct tb_product {
    enum tb_terms       terms;
    const tb_pair     * pair;
    const tb_input    * input;
    const ggml_tensor * matmul;
    char              * y_data;
};

// The nodes of one graph, and their memory, which is kept from graph to graph.
struct tb_nodes {
    std::vector<std::unique_ptr<tb_input>>   inputs;
    std::vector<std::unique_ptr<tb_product>> products;
    size_t         n_inputs   = 0;
    size_t         n_products = 0;
    tb_input     * current    = nullptr; // the input whose rounded rows are in scratch at this point of the graph
    uint8_t      * scratch    = nullptr;
    size_t         scratch_size = 0;
    ggml_context * ctx          = nullptr;
    size_t         ctx_nodes    = 0;

    ~tb_nodes();
};

// Whether the residual of `pair` can be added to this matmul (MUL_MAT or MUL_MAT_ID); if not, tb_set_error has the reason.
bool tb_can_multiply(const tb_pair & pair, const ggml_tensor * matmul);

// Begins a graph of at most n_products products whose inputs take at most scratch_size bytes each.
bool   tb_nodes_begin(tb_nodes & nodes, size_t n_products, size_t scratch_size);
size_t tb_scratch_size(const tb_pair & pair, const ggml_tensor * matmul);

// Appends to `out` the nodes that add R·x to a matmul's result, or that compute it. x_data, ids_data, y_data: where x, ids and y lie if not in the tensors' own memory,
// for matmuls on another device; else NULL.
void tb_add_product(tb_nodes & nodes, enum tb_terms terms, const tb_pair & pair, const ggml_tensor * matmul, const void * x_data, const void * ids_data,
                    void * y_data, std::vector<ggml_tensor *> & out);
