#include "buffer.h"

#include "log.h"
#include "pairs.h"
#include "sources.h"
#include "xxh64.h"


#include <mutex>
#include <string>
#include <vector>

// ---- buffer

struct paired_buffer {
    ggml_backend_buffer_t      inner;
    bool                       from_ptr; // over memory that already holds the weights
    std::vector<ggml_tensor *> tensors;  // paired here: the pairing ends with the buffer
};

static paired_buffer * context_of(ggml_backend_buffer_t buffer) {
    return (paired_buffer *) buffer->context;
}

// Inner backends know their buffers by pointer, so while they handle a tensor it must point to theirs.
struct in_inner {
    ggml_tensor         * tensor;
    ggml_backend_buffer_t outer;

    in_inner(const ggml_tensor * t, ggml_backend_buffer_t inner) : tensor((ggml_tensor *) t), outer(t->buffer) { tensor->buffer = inner; }
    ~in_inner() { tensor->buffer = outer; }
};

// The bytes of a base are known: finds the residual that was made for them. `base_data`: all of the tensor's bytes, in host memory.
static void pair_with_bytes(const ggml_tensor * tensor, const void * base_data) {
    tb_pair * pair = tb_pairs_find(tensor);
    if (!pair || pair->verified || pair->broken) {
        return;
    }
    if (pair->section->flags & TWOBIT_ATTACH_NO_VERIFY) {
        pair->verified = true;
        return;
    }
    // two models that load at once may have tensors of the same name and shape: the bytes tell them apart
    const uint64_t base_xxh64 = tb_xxh64(base_data, ggml_nbytes(tensor));
    std::shared_ptr<tb_section> section;
    const tb_residual * exact = tb_sources_find_exact(tensor, base_xxh64, section);
    if (exact && exact != pair->residual) {
        auto better = std::make_unique<tb_pair>();
        better->section  = section;
        better->residual = exact;
        tb_pairs_add(tensor, std::move(better));
        pair = tb_pairs_find(tensor);
    }
    tb_pair_verify(*pair, tensor, base_xxh64);
}

static void paired_buffer_free(ggml_backend_buffer_t buffer) {
    paired_buffer * ctx = context_of(buffer);
    for (ggml_tensor * tensor : ctx->tensors) {
        tb_pairs_remove(tensor);
    }
    ggml_backend_buffer_free(ctx->inner);
    delete ctx;
}

static void * paired_buffer_get_base(ggml_backend_buffer_t buffer) {
    return ggml_backend_buffer_get_base(context_of(buffer)->inner);
}

static enum ggml_status paired_buffer_init_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor) {
    paired_buffer * ctx = context_of(buffer);
    {
        in_inner scope(tensor, ctx->inner);
        const enum ggml_status status = ggml_backend_buffer_init_tensor(ctx->inner, tensor);
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
    }
    if (tensor->view_src) {
        return GGML_STATUS_SUCCESS;
    }
    auto pair = std::make_unique<tb_pair>();
    pair->residual = tb_sources_find(tensor, pair->section);
    if (!pair->residual) {
        return GGML_STATUS_SUCCESS; // a host that puts other weights here: they run as they are
    }
    tb_pairs_add(tensor, std::move(pair));
    ctx->tensors.push_back(tensor);
    if (ctx->from_ptr) {
        pair_with_bytes(tensor, tensor->data);
    }
    return GGML_STATUS_SUCCESS;
}

static void paired_buffer_memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    paired_buffer * ctx = context_of(buffer);
    in_inner scope(tensor, ctx->inner);
    ctx->inner->iface.memset_tensor(ctx->inner, tensor, value, offset, size);
}

static void paired_buffer_get_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    paired_buffer * ctx = context_of(buffer);
    in_inner scope(tensor, ctx->inner);
    ctx->inner->iface.get_tensor(ctx->inner, tensor, data, offset, size);
}

static void paired_buffer_set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    paired_buffer * ctx = context_of(buffer);
    {
        in_inner scope(tensor, ctx->inner);
        ctx->inner->iface.set_tensor(ctx->inner, tensor, data, offset, size);
    }
    const size_t nbytes = ggml_nbytes(tensor);
    if (offset + size < nbytes) {
        return; // more is to come
    }
    if (offset == 0) {
        pair_with_bytes(tensor, data);
    } else if (tb_pairs_find(tensor)) { // written in pieces: read it back whole
        std::vector<uint8_t> bytes(nbytes);
        paired_buffer_get_tensor(buffer, tensor, bytes.data(), 0, nbytes);
        pair_with_bytes(tensor, bytes.data());
    }
    // From here on the tensor is the inner backend's. (Memory of the host stays ours: everyone takes it.)
    if (!ggml_backend_buffer_is_host(buffer)) {
        tensor->buffer = ctx->inner;
    }
}

static bool paired_buffer_cpy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * src, ggml_tensor * dst) {
    return false; // through set_tensor, so that the bytes are seen
}

static void paired_buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    ggml_backend_buffer_clear(context_of(buffer)->inner, value);
}

static const ggml_backend_buffer_i paired_buffer_i = {
    /* .free_buffer   = */ paired_buffer_free,
    /* .get_base      = */ paired_buffer_get_base,
    /* .init_tensor   = */ paired_buffer_init_tensor,
    /* .memset_tensor = */ paired_buffer_memset_tensor,
    /* .set_tensor    = */ paired_buffer_set_tensor,
    /* .get_tensor    = */ paired_buffer_get_tensor,
    /* .set_tensor_2d = */ NULL,
    /* .get_tensor_2d = */ NULL,
    /* .cpy_tensor    = */ paired_buffer_cpy_tensor,
    /* .clear         = */ paired_buffer_clear,
    /* .reset         = */ NULL,
};

static ggml_backend_buffer_t wrap(ggml_backend_buffer_type_t buft, ggml_backend_buffer_t inner, bool from_ptr) {
    if (!inner) {
        return nullptr;
    }
    // the scheduler runs an operation where its weights are; it asks the buffer a tensor points to, which will be the inner one
    ggml_backend_buffer_set_usage(inner, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    return ggml_backend_buffer_init(buft, paired_buffer_i, new paired_buffer { inner, from_ptr, {} }, ggml_backend_buffer_get_size(inner));
}

// ---- buffer type

struct paired_buft {
    ggml_backend_buffer_type   buft;
    ggml_backend_buffer_type_t inner;
    std::string                name;
};

static ggml_backend_buffer_type_t inner_of(ggml_backend_buffer_type_t buft) {
    return ((paired_buft *) buft->context)->inner;
}

static const char * paired_buft_get_name(ggml_backend_buffer_type_t buft) {
    return ((paired_buft *) buft->context)->name.c_str();
}

static ggml_backend_buffer_t paired_buft_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    if (size == 0) {
        // llama.cpp's question whether a weight may live here: no memory, so nothing to wrap
        static const ggml_backend_buffer_i none = {};
        return ggml_backend_buffer_init(buft, none, nullptr, 0);
    }
    return wrap(buft, ggml_backend_buft_alloc_buffer(inner_of(buft), size), /*from_ptr =*/ false);
}

static size_t paired_buft_get_alignment(ggml_backend_buffer_type_t buft) {
    return ggml_backend_buft_get_alignment(inner_of(buft));
}

static size_t paired_buft_get_max_size(ggml_backend_buffer_type_t buft) {
    return ggml_backend_buft_get_max_size(inner_of(buft));
}

static size_t paired_buft_get_alloc_size(ggml_backend_buffer_type_t buft, const ggml_tensor * tensor) {
    return ggml_backend_buft_get_alloc_size(inner_of(buft), tensor);
}

static bool paired_buft_is_host(ggml_backend_buffer_type_t buft) {
    return inner_of(buft) == ggml_backend_cpu_buffer_type();
}

ggml_backend_buffer_type_t tb_paired_buft(ggml_backend_buffer_type_t inner, ggml_backend_dev_t device) {
    static std::mutex                 mutex;
    static std::vector<paired_buft *> bufts;
    std::lock_guard<std::mutex> lock(mutex);
    for (paired_buft * p : bufts) {
        if (p->inner == inner) {
            return &p->buft;
        }
    }
    paired_buft * p = new paired_buft;
    p->inner        = inner;
    p->name         = std::string(ggml_backend_buft_name(inner)) + "_TWOBIT";
    p->buft.iface   = {
        /* .get_name       = */ paired_buft_get_name,
        /* .alloc_buffer   = */ paired_buft_alloc_buffer,
        /* .get_alignment  = */ paired_buft_get_alignment,
        /* .get_max_size   = */ paired_buft_get_max_size,
        /* .get_alloc_size = */ paired_buft_get_alloc_size,
        /* .is_host        = */ paired_buft_is_host,
    };
    p->buft.device  = device;
    p->buft.context = p;
    bufts.push_back(p);
    return &p->buft;
}

bool tb_is_paired_buft(ggml_backend_buffer_type_t buft) {
    return buft && buft->iface.get_name == paired_buft_get_name;
}

ggml_backend_buffer_t tb_paired_buffer_from_ptr(ggml_backend_buffer_type_t buft, void * ptr, size_t size) {
    return wrap(buft, ggml_backend_cpu_buffer_from_ptr(ptr, size), /*from_ptr =*/ true);
}
