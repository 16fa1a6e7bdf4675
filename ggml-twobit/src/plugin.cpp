// plugin.cpp: the ggml backend: backend → device → registry, top to bottom, like ggml's own.
//
// TWOBITn     a GPU-type device over the n-th GPU (or over the CPU where there is none). It is that device, but for weights with a residual.
// TWOBIT-CPU  an ACCEL-type device over the CPU, for the layers that stay there. llama.cpp adds it to every context by itself.

#include "buffer.h"
#include "compute.h"
#include "error.h"
#include "ggml-backend-impl.h"
#include "log.h"
#include "pairs.h"
#include "sources.h"
#include "twobit.h"

#include <string.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

static ggml_backend_reg_t tb_reg(void);

struct tb_device {
    ggml_backend_device dev;
    std::string         name;
    std::string         description;
    bool                accel;
    ggml_backend_dev_t  inner; // NULL until it is first asked for, see inner_of
};

static tb_device * device_of(ggml_backend_dev_t dev) {
    return (tb_device *) dev->context;
}

static bool is_ours(ggml_backend_dev_t dev) {
    return ggml_backend_dev_backend_reg(dev) == tb_reg();
}

static bool is_gpu(ggml_backend_dev_t dev) {
    const enum ggml_backend_dev_type type = ggml_backend_dev_type(dev);
    return type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU;
}

// Where no GPU was there when the plugin was loaded, TWOBIT0 takes the first one that has come since (an RPC server, say), else the CPU.
static ggml_backend_dev_t peek_inner(ggml_backend_dev_t dev) {
    tb_device * d = device_of(dev);
    if (d->inner) {
        return d->inner;
    }
    for (size_t i = 0; !d->accel && i < ggml_backend_dev_count(); i++) {
        ggml_backend_dev_t other = ggml_backend_dev_get(i);
        if (!is_ours(other) && is_gpu(other)) {
            return other;
        }
    }
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

// the same for good: once something has been made on the device it stays
static ggml_backend_dev_t inner_of(ggml_backend_dev_t dev) {
    static std::mutex mutex;
    std::lock_guard<std::mutex> lock(mutex);
    return device_of(dev)->inner = peek_inner(dev);
}

static bool is_over_cpu(ggml_backend_dev_t dev) {
    return ggml_backend_dev_type(inner_of(dev)) == GGML_BACKEND_DEVICE_TYPE_CPU;
}

static ggml_backend_dev_t g_accel; // TWOBIT-CPU, set when the plugin is loaded

// weights with a residual that this device computes with live in this type of buffer
static ggml_backend_buffer_type_t paired_buft_of(ggml_backend_dev_t dev) {
    // over the CPU all of our devices share one type; it belongs to the one whose default type it is, so that llama.cpp maps weights into it
    return tb_paired_buft(ggml_backend_dev_buffer_type(inner_of(dev)), is_over_cpu(dev) ? g_accel : dev);
}

// ---- backend

static tb_compute & compute_of(ggml_backend_t backend) {
    return *(tb_compute *) backend->context;
}

static const char * tb_backend_get_name(ggml_backend_t backend) {
    return device_of(backend->device)->name.c_str();
}

static void tb_backend_free(ggml_backend_t backend) {
    delete (tb_compute *) backend->context;
    delete backend;
}

static void tb_backend_set_tensor_async(ggml_backend_t backend, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    ggml_backend_tensor_set_async(compute_of(backend).inner, tensor, data, offset, size);
}

static void tb_backend_get_tensor_async(ggml_backend_t backend, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    ggml_backend_tensor_get_async(compute_of(backend).inner, tensor, data, offset, size);
}

static void tb_backend_synchronize(ggml_backend_t backend) {
    ggml_backend_synchronize(compute_of(backend).inner);
}

static enum ggml_status tb_backend_graph_compute(ggml_backend_t backend, ggml_cgraph * cgraph) {
    return tb_compute_graph(compute_of(backend), cgraph);
}

static void tb_backend_graph_optimize(ggml_backend_t backend, ggml_cgraph * cgraph, ggml_backend_graph_optimize_params * params) {
    ggml_backend_t inner = compute_of(backend).inner;
    if (inner->iface.graph_optimize) {
        inner->iface.graph_optimize(inner, cgraph, params);
    }
}

static const ggml_backend_i tb_backend_i = {
    /* .get_name                = */ tb_backend_get_name,
    /* .free                    = */ tb_backend_free,
    /* .set_tensor_async        = */ tb_backend_set_tensor_async,
    /* .get_tensor_async        = */ tb_backend_get_tensor_async,
    /* .set_tensor_2d_async     = */ NULL,
    /* .get_tensor_2d_async     = */ NULL,
    /* .cpy_tensor_async        = */ NULL,
    /* .synchronize             = */ tb_backend_synchronize,
    /* .graph_plan_create       = */ NULL,
    /* .graph_plan_free         = */ NULL,
    /* .graph_plan_update       = */ NULL,
    /* .graph_plan_compute      = */ NULL,
    /* .graph_compute           = */ tb_backend_graph_compute,
    /* .event_record            = */ NULL,
    /* .event_wait              = */ NULL,
    /* .graph_optimize          = */ tb_backend_graph_optimize,
};

static ggml_guid_t tb_backend_guid(void) {
    static ggml_guid guid = { 0x74, 0x77, 0x6f, 0x62, 0x69, 0x74, 0x2d, 0x67, 0x67, 0x6d, 0x6c, 0x2d, 0x76, 0x31, 0x00, 0x01 };
    return &guid;
}

// calls the function `name` of the inner backend's registry, if it has one
template <typename F, typename... A>
static void call_inner(ggml_backend_t inner, const char * name, A... args) {
    if (!inner) {
        return;
    }
    F fn = (F) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(ggml_backend_get_device(inner)), name);
    if (fn) {
        fn(inner, args...);
    }
}

static void tb_backend_set_n_threads(ggml_backend_t backend, int n_threads) {
    tb_compute & c = compute_of(backend);
    if (device_of(backend->device)->accel && !c.ran) { // llama.cpp calls this before every graph, for every backend of the context
        c.ran = true;
        tb_sources_loading_done();
    }
    c.invariant.n_threads = n_threads;
    call_inner<ggml_backend_set_n_threads_t>(c.inner, "ggml_backend_set_n_threads", n_threads);
    call_inner<ggml_backend_set_n_threads_t>(c.cpu,   "ggml_backend_set_n_threads", n_threads);
}

static void tb_backend_set_abort_callback(ggml_backend_t backend, ggml_abort_callback callback, void * data) {
    tb_compute & c = compute_of(backend);
    call_inner<ggml_backend_set_abort_callback_t>(c.inner, "ggml_backend_set_abort_callback", callback, data);
    call_inner<ggml_backend_set_abort_callback_t>(c.cpu,   "ggml_backend_set_abort_callback", callback, data);
}

// ---- device

// what staging takes on a wrapped GPU, roughly; not offered to llama.cpp's automatic fitting
static const size_t STAGING_RESERVE = (size_t) 64 << 20;

static const char * tb_device_get_name(ggml_backend_dev_t dev) {
    return device_of(dev)->name.c_str();
}

static const char * tb_device_get_description(ggml_backend_dev_t dev) {
    tb_device * d = device_of(dev);
    d->description = std::string("2-bit base and residual over ") + ggml_backend_dev_description(peek_inner(dev));
    return d->description.c_str();
}

static void tb_device_get_memory(ggml_backend_dev_t dev, size_t * free, size_t * total) {
    ggml_backend_dev_memory(peek_inner(dev), free, total);
    if (is_gpu(peek_inner(dev)) && *free > 2*STAGING_RESERVE) {
        *free -= STAGING_RESERVE;
    }
}

static enum ggml_backend_dev_type tb_device_get_type(ggml_backend_dev_t dev) {
    if (device_of(dev)->accel) {
        return GGML_BACKEND_DEVICE_TYPE_ACCEL;
    }
    return is_gpu(peek_inner(dev)) ? ggml_backend_dev_type(peek_inner(dev)) : GGML_BACKEND_DEVICE_TYPE_GPU;
}

static void tb_device_get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    ggml_backend_dev_get_props(peek_inner(dev), props);
    props->name        = tb_device_get_name(dev);
    props->description = tb_device_get_description(dev);
    props->type        = tb_device_get_type(dev);
    tb_device_get_memory(dev, &props->memory_free, &props->memory_total);
    props->caps.events = false; // no pipeline parallelism across our devices
}

static ggml_backend_t tb_device_init_backend(ggml_backend_dev_t dev, const char * params) {
    auto compute = std::make_unique<tb_compute>();
    compute->inner = ggml_backend_dev_init(inner_of(dev), params);
    if (compute->inner && !is_over_cpu(dev)) {
        compute->cpu = ggml_backend_dev_init(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), nullptr);
    }
    if (!compute->inner || (!is_over_cpu(dev) && !compute->cpu)) {
        TB_LOG_ERROR("%s: cannot start %s\n", tb_device_get_name(dev), ggml_backend_dev_name(inner_of(dev)));
        return nullptr;
    }
    if (device_of(dev)->accel) {
        tb_sources_context_made(); // every context starts this backend, after its model has been loaded
    }
    return new ggml_backend {
        /* .guid    = */ tb_backend_guid(),
        /* .iface   = */ tb_backend_i,
        /* .device  = */ dev,
        /* .context = */ compute.release(),
    };
}

static ggml_backend_buffer_type_t tb_device_get_buffer_type(ggml_backend_dev_t dev) {
    return device_of(dev)->accel ? paired_buft_of(dev) : ggml_backend_dev_buffer_type(inner_of(dev));
}

static ggml_backend_buffer_type_t tb_device_get_host_buffer_type(ggml_backend_dev_t dev) {
    return device_of(dev)->accel ? nullptr : ggml_backend_dev_host_buffer_type(inner_of(dev));
}

static ggml_backend_buffer_t tb_device_buffer_from_host_ptr(ggml_backend_dev_t dev, void * ptr, size_t size, size_t max_tensor_size) {
    if (device_of(dev)->accel) {
        return tb_paired_buffer_from_ptr(paired_buft_of(dev), ptr, size);
    }
    return ggml_backend_dev_buffer_from_host_ptr(inner_of(dev), ptr, size, max_tensor_size);
}

// llama.cpp asks whether a weight may live in a buffer type by an operation whose weight lies in an empty buffer of that type
static bool is_question(const ggml_tensor * op) {
    const ggml_tensor * w = op->src[0];
    return w && w->buffer && w->buffer->size == 0 && !w->data;
}

static bool answer(ggml_backend_dev_t dev, const ggml_tensor * op) {
    const ggml_tensor * w = op->src[0];
    const bool in_paired  = tb_is_paired_buft(w->buffer->buft);
    const bool is_matmul  = op->op == GGML_OP_MUL_MAT || op->op == GGML_OP_MUL_MAT_ID;

    std::shared_ptr<tb_section> section;
    const tb_residual * residual = tb_sources_find(w, section); // looks at the open files for every weight, the unpaired ones too
    if (!is_matmul) {
        residual = nullptr;
    }
    if (in_paired != (residual != nullptr) || (in_paired && w->buffer->buft != paired_buft_of(dev))) {
        return false;
    }
    // the inner device must not see our buffer
    ggml_tensor w_inner = *w;
    ggml_tensor o_inner = *op;
    if (in_paired) {
        w_inner.buffer = nullptr;
        o_inner.src[0] = &w_inner;
    }
    return ggml_backend_dev_supports_op(inner_of(dev), &o_inner);
}

static bool tb_device_supports_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    if (is_question(op)) {
        return answer(dev, op);
    }
    // Where nothing is paired the CPU's work is left to the CPU; else one of our devices takes all of it, so that the graph stays in one piece.
    if (device_of(dev)->accel && tb_pairs_count() == 0) {
        return false;
    }
    return ggml_backend_dev_supports_op(inner_of(dev), op);
}

static bool tb_device_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    if (tb_is_paired_buft(buft)) {
        return buft == paired_buft_of(dev);
    }
    return ggml_backend_dev_supports_buft(inner_of(dev), buft);
}

static bool tb_device_offload_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    // a weight copied for one operation would leave its residual behind
    if (op->src[0] && tb_pairs_find(op->src[0])) {
        return false;
    }
    return ggml_backend_dev_offload_op(inner_of(dev), op);
}

static const ggml_backend_device_i tb_device_i = {
    /* .get_name             = */ tb_device_get_name,
    /* .get_description      = */ tb_device_get_description,
    /* .get_memory           = */ tb_device_get_memory,
    /* .get_type             = */ tb_device_get_type,
    /* .get_props            = */ tb_device_get_props,
    /* .init_backend         = */ tb_device_init_backend,
    /* .get_buffer_type      = */ tb_device_get_buffer_type,
    /* .get_host_buffer_type = */ tb_device_get_host_buffer_type,
    /* .buffer_from_host_ptr = */ tb_device_buffer_from_host_ptr,
    /* .supports_op          = */ tb_device_supports_op,
    /* .supports_buft        = */ tb_device_supports_buft,
    /* .offload_op           = */ tb_device_offload_op,
    /* .event_new            = */ NULL,
    /* .event_free           = */ NULL,
    /* .event_synchronize    = */ NULL,
};

static ggml_backend_buffer_type_t * tb_device_get_extra_bufts(ggml_backend_dev_t dev) {
    static std::mutex mutex;
    static std::vector<std::pair<ggml_backend_buffer_type_t, std::unique_ptr<ggml_backend_buffer_type_t[]>>> lists;
    std::lock_guard<std::mutex> lock(mutex);
    ggml_backend_buffer_type_t buft = paired_buft_of(dev);
    for (auto & list : lists) {
        if (list.first == buft) {
            return list.second.get();
        }
    }
    lists.emplace_back(buft, new ggml_backend_buffer_type_t[2] { buft, nullptr });
    return lists.back().second.get();
}

// ---- registry

struct tb_registry {
    std::mutex                              mutex;
    std::vector<std::unique_ptr<tb_device>> devices;
};

static tb_registry & registry(void) {
    static tb_registry * r = new tb_registry; // ggml never unloads a backend at exit
    return *r;
}

static tb_device * add_device(const std::string & name, bool accel, ggml_backend_dev_t inner) {
    auto d = std::make_unique<tb_device>();
    d->dev   = { tb_device_i, tb_reg(), d.get() };
    d->name  = name;
    d->accel = accel;
    d->inner = inner;
    registry().devices.push_back(std::move(d));
    return registry().devices.back().get();
}

static size_t n_gpu_devices(void) {
    size_t n = 0;
    for (const auto & d : registry().devices) {
        n += !d->accel;
    }
    return n;
}

static bool is_wrapped(ggml_backend_dev_t dev) {
    for (const auto & d : registry().devices) {
        if (!d->accel && d->inner == dev) {
            return true;
        }
    }
    return false;
}

// a TWOBITn for every GPU that has none; returns how many were added
static int wrap_gpus(bool announce) {
    int n = 0;
    std::vector<ggml_backend_dev_t> gpus;
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_dev_t dev = ggml_backend_dev_get(i);
        if (!is_ours(dev) && is_gpu(dev)) {
            gpus.push_back(dev);
        }
    }
    for (ggml_backend_dev_t dev : gpus) {
        if (is_wrapped(dev)) {
            continue;
        }
        tb_device * d = add_device("TWOBIT" + std::to_string(n_gpu_devices()), /*accel =*/ false, dev);
        if (announce) {
            ggml_backend_device_register(&d->dev);
        }
        n++;
    }
    return n;
}

static const char * tb_reg_get_name(ggml_backend_reg_t reg) {
    return "TWOBIT";
}

static size_t tb_reg_get_device_count(ggml_backend_reg_t reg) {
    return registry().devices.size();
}

static ggml_backend_dev_t tb_reg_get_device(ggml_backend_reg_t reg, size_t index) {
    return index < registry().devices.size() ? &registry().devices[index]->dev : nullptr;
}

static void * tb_reg_get_proc_address(ggml_backend_reg_t reg, const char * name) {
    static const struct { const char * name; void * function; } functions[] = {
        { "ggml_backend_set_n_threads",       (void *) tb_backend_set_n_threads      },
        { "ggml_backend_set_abort_callback",  (void *) tb_backend_set_abort_callback },
        { "ggml_backend_dev_get_extra_bufts", (void *) tb_device_get_extra_bufts     },
        { "twobit_set_mode",                  (void *) twobit_set_mode               },
        { "twobit_get_counters",              (void *) twobit_get_counters           },
    };
    for (const auto & f : functions) {
        if (strcmp(name, f.name) == 0) {
            return f.function;
        }
    }
    return nullptr;
}

static ggml_backend_reg_t tb_reg(void) {
    static ggml_backend_reg reg = {
        /* .api_version = */ GGML_BACKEND_API_VERSION,
        /* .iface       = */ {
            /* .get_name         = */ tb_reg_get_name,
            /* .get_device_count = */ tb_reg_get_device_count,
            /* .get_device       = */ tb_reg_get_device,
            /* .get_proc_address = */ tb_reg_get_proc_address,
        },
        /* .context     = */ NULL,
    };
    return &reg;
}

// The private structures of ggml that this plugin reads must be those of the ggml in the process.
static bool is_our_ggml(void) {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (!cpu) {
        TB_LOG_ERROR("ggml has no CPU device; load its CPU backend before twobit\n");
        return false;
    }
    const char * why = nullptr;
    if (ggml_backend_dev_backend_reg(cpu)->api_version != GGML_BACKEND_API_VERSION) {
        why = "another backend API version";
    } else if (strcmp(ggml_version(), TWOBIT_GGML_VERSION) != 0) {
        why = ggml_version();
    } else if (ggml_tensor_overhead() != GGML_TENSOR_SIZE + 32 || strcmp(ggml_type_name(GGML_TYPE_Q2_0), "q2_0") != 0 ||
               strcmp(ggml_op_name(GGML_OP_CUSTOM), "CUSTOM") != 0 || strcmp(ggml_op_name(GGML_OP_MUL_MAT_ID), "MUL_MAT_ID") != 0) {
        why = "other structures";
    }
    if (why) {
        TB_LOG_ERROR("built for ggml %s of llama-cpp-python %s, but the ggml running here has: %s; install matching versions\n", TWOBIT_GGML_VERSION,
                     TWOBIT_LLAMA_CPP_PYTHON_VERSION, why);
    }
    return !why;
}

extern "C" { GGML_BACKEND_API ggml_backend_reg_t ggml_backend_init(void); }

ggml_backend_reg_t ggml_backend_init(void) {
    if (!is_our_ggml()) {
        return nullptr;
    }
    std::lock_guard<std::mutex> lock(registry().mutex);
    if (registry().devices.empty()) {
        wrap_gpus(/*announce =*/ false);
        if (registry().devices.empty()) {
            add_device("TWOBIT0", /*accel =*/ false, nullptr);
        }
        g_accel = &add_device("TWOBIT-CPU", /*accel =*/ true, nullptr)->dev;
    }
    return tb_reg();
}

// ---- the public functions that concern devices

extern "C" int twobit_rescan_devices(void) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    for (const auto & d : registry().devices) {
        if (!d->accel) {
            inner_of(&d->dev); // an unclaimed TWOBIT0 takes the first new GPU
        }
    }
    return wrap_gpus(/*announce =*/ true);
}

extern "C" int twobit_attach(const char * model_path, const char * residual_path, int flags) {
    return model_path ? tb_sources_attach(model_path, residual_path, flags) : tb_set_error("no model path");
}

extern "C" int twobit_detach(const char * model_path) {
    return model_path ? tb_sources_detach(model_path) : tb_set_error("no model path");
}
