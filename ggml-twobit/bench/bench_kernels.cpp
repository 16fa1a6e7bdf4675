// bench_kernels.cpp: times of our kernels, ggml's, and a pure read of the same bytes, all in ggml's own threads.
//
//     [--only NAME,…] [--kernel SET] [--tokens 1,2,…] [--threads 1,2,…] [--weights MILLIONS] [--seconds S]
//
// The contestants take turns: between two passes over the same weights all the others' go by, so nothing stays in a cache. Prints
// JSON with every single time; twobit_gguf/bench_kernels.py makes tables and plots of it.

#include "contestants.h"
#include "kernels/kernels.h"

#include "ggml-cpu.h"

#include <sys/mman.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

static double now() { // seconds
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// the matrices of a llama of 1B weights: attention, feed-forward up and down; and three slices of wide ones, to end with
static std::vector<shape> model(int64_t millions) {
    std::vector<shape> shapes;
    int64_t n = 0;
    const auto add = [&](int count, int64_t rows, int64_t cols) {
        for (int i = 0; i < count && n < millions * 1000000; i++) {
            shapes.push_back({ rows, cols });
            n += rows * cols;
        }
    };
    while (n < millions * 700000) {
        add(4, 2048, 2048);
        add(2, 5632, 2048);
        add(1, 2048, 5632);
    }
    while (n < millions * 1000000) {
        add(1, 896, 21504);
    }
    return shapes;
}

static std::vector<std::string> split(const char * list) {
    std::vector<std::string> parts;
    for (const char * p = list; *p;) {
        const size_t n = strcspn(p, ",");
        parts.emplace_back(p, n);
        p += n + (p[n] == ',');
    }
    return parts;
}

static std::vector<int> numbers(const char * list) {
    std::vector<int> values;
    for (const std::string & part : split(list)) {
        values.push_back(atoi(part.c_str()));
        if (values.back() < 1 || values.back() > 512) {
            fprintf(stderr, "%s: not a number from 1 to 512\n", part.c_str());
            exit(2);
        }
    }
    return values;
}

static const struct {
    const char * name;
    int          base, bits;
} OURS[] = {
    { "R4", 0, 4 }, { "R5", 0, 5 }, { "R6", 0, 6 }, { "R8", 0, 8 },
    { "base Q2_K", TB_BASE_Q2_K, 0 }, { "base Q2_0", TB_BASE_Q2_0, 0 }, { "base Q2_K+R6", TB_BASE_Q2_K, 6 }, { "base Q2_0+R6", TB_BASE_Q2_0, 6 },
};

static const struct {
    const char * name;
    ggml_type    type;
    bool         repack;
} GGML[] = {
    { "Q8_0", GGML_TYPE_Q8_0, false }, { "Q6_K", GGML_TYPE_Q6_K, false }, { "Q2_K", GGML_TYPE_Q2_K, false },
    { "Q2_K repacked", GGML_TYPE_Q2_K, true }, { "Q2_0", GGML_TYPE_Q2_0, false },
};

static contestant * make(const std::string & name, const char * kernel, const std::vector<shape> & shapes) {
    if (name == "read") {
        return new_read(shapes);
    }
    for (const auto & o : OURS) {
        if (name == o.name) {
            return new_ours(o.base, o.bits, kernel, shapes);
        }
    }
    for (const auto & g : GGML) {
        if (name == g.name) {
            return new_ggml(g.type, g.repack, shapes);
        }
    }
    fprintf(stderr, "%s: not a contestant\n", name.c_str());
    exit(2);
}

struct series {
    int contestant, threads, tokens;
    ggml_cgraph * graph;
    std::vector<double> seconds;
};

// The process has called ggml's libraries up already. Returns the exit status.
extern "C" __attribute__((visibility("default"))) int twobit_bench_kernels(int argc, char ** argv) {
    std::vector<std::string> names = { "read", "R4", "R5", "R6", "R8", "base Q2_K", "base Q2_K+R6", "Q8_0", "Q6_K", "Q2_K", "Q2_K repacked" };
    std::vector<int> tokens = { 1, 2, 4, 8, 16, 32 }, threads = { 1, 2 };
    const char * kernel = NULL;
    int64_t millions = 1000;
    double seconds = 60.0;
    for (int i = 0; i < argc; i += 2) {
        const std::string option = argv[i];
        const char * value = i + 1 < argc ? argv[i + 1] : "";
        if (option == "--only") names = split(value);
        else if (option == "--kernel") kernel = value;
        else if (option == "--tokens") tokens = numbers(value);
        else if (option == "--threads") threads = numbers(value);
        else if (option == "--weights") millions = atoll(value);
        else if (option == "--seconds") seconds = atof(value);
        else {
            fprintf(stderr, "%s: unknown option\n", argv[i]);
            return 2;
        }
    }
    ggml_cpu_init();
    const std::vector<shape> shapes = model(millions);
    int64_t n_weights = 0, widest = 0, tallest = 0;
    for (const shape & s : shapes) {
        n_weights += s.rows * s.cols;
        widest = std::max(widest, s.cols);
        tallest = std::max(tallest, s.rows);
    }
    int most = 1;
    for (int t : tokens) {
        most = std::max(most, t);
    }

    std::vector<std::unique_ptr<contestant>> contestants;
    for (const std::string & name : names) {
        fprintf(stderr, "preparing %s\n", name.c_str());
        if (contestant * c = make(name, kernel, shapes)) {
            contestants.emplace_back(c);
        }
    }
    const size_t n_graphs = contestants.size() * tokens.size();
    workspace ws;
    ws.ctx = ggml_init({ n_graphs * (ggml_graph_overhead_custom(8 * shapes.size() + 64, false) + shapes.size() * 6 * ggml_tensor_overhead()), NULL, true });
    std::vector<float> x(most * widest), y(most * tallest);
    for (size_t i = 0; i < x.size(); i++) {
        x[i] = (float) ((i * 2654435761u >> 8 & 0xffff) - 32768.0) / 32768.0f;
    }
    ws.x = x.data();
    ws.y = y.data();
    ws.acts = aligned_alloc(64, (tb_acts_nbytes(most, widest) + 63) / 64 * 64);

    std::vector<series> all;
    for (size_t c = 0; c < contestants.size(); c++) {
        for (int t : tokens) {
            if (contestants[c]->name == "read" && t != tokens[0]) {
                continue; // no tokens in it
            }
            ggml_cgraph * graph = contestants[c]->graph(ws, t);
            for (int n : threads) {
                all.push_back({ (int) c, n, contestants[c]->name == "read" ? 0 : t, graph, {} });
            }
        }
    }
    const double start = now();
    std::vector<uint8_t> work;
    for (int round = 0; round < 3 || now() - start < seconds; round++) {
        fprintf(stderr, "round %d, %.0f of %.0f s\n", round + 1, now() - start, seconds);
        for (series & s : all) {
            ggml_cplan plan = ggml_graph_plan(s.graph, s.threads, NULL);
            work.resize(std::max(work.size(), plan.work_size + 64));
            plan.work_data = work.data();
            const double t0 = now();
            ggml_graph_compute(s.graph, &plan);
            if (round > 0) { // the first one warms up
                s.seconds.push_back(now() - t0);
            }
        }
    }

    printf("{\"kernel\": \"%s\", \"weights\": %lld, \"matrices\": %zu, \"series\": [", kernel ? kernel : tb_kernels_best()->name,
           (long long) n_weights, shapes.size());
    for (size_t i = 0; i < all.size(); i++) {
        const series & s = all[i];
        printf("%s\n{\"name\": \"%s\", \"bytes\": %lld, \"threads\": %d, \"tokens\": %d, \"seconds\": [", i ? "," : "",
               contestants[s.contestant]->name.c_str(), (long long) contestants[s.contestant]->nbytes, s.threads, s.tokens);
        for (size_t j = 0; j < s.seconds.size(); j++) {
            printf("%s%.6f", j ? ", " : "", s.seconds[j]);
        }
        printf("]}");
    }
    printf("]}\n");
    fflush(stdout);
    return 0;
}
