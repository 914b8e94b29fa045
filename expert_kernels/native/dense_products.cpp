// Linear layers and attention of one row, by the kernels that experts run on (kernels.h).
//
// A linear layer is a job of tiles of outputs for the threads of the pool; a small one runs on the
// calling thread. Attention of one head of keys (and of all heads of queries that share it) is one
// tile: q * keys is dot_rows, probabilities * values is sum_columns.

#include <algorithm>
#include <cmath>

#include "dense_values.h"
#include "exponential.h"
#include "step_job.h"

namespace {

constexpr int64_t MOST_TILE_BYTES = 256 * 1024;
constexpr int MAX_TILE_OUTPUTS = 256;
constexpr int ROWS_PER_PASS = 12;

struct LinearJob {
    const DenseRun& run;
    const HrOp* ops;
    const float* x;  // [rows, x_stride], zeros beyond depth
    int64_t x_stride;
    int64_t tile_outputs;
    JoinedTiles tiles;
};

void run_linear_tile(void* context, int64_t tile, int64_t) {
    const LinearJob& job = *static_cast<const LinearJob*>(context);
    const int matrix = job.tiles.matrix_of(tile);
    const HrOp& op = job.ops[matrix];
    const int64_t rows = op.sizes[0], outputs = op.sizes[1], depth = op.sizes[2];
    const int64_t begin = (tile - job.tiles.begin[matrix]) * job.tile_outputs;
    const int count = int(std::min(job.tile_outputs, outputs - begin));
    const int64_t item = bytes_of(op.b.dtype), out_item = bytes_of(op.out.dtype);
    const bool is_row_major = op.b.strides[1] == 1;
    alignas(64) float sums[ROWS_PER_PASS * MAX_TILE_OUTPUTS];
    float biases[MAX_TILE_OUTPUTS];
    const float* x[ROWS_PER_PASS];
    for (int64_t done = 0; done < rows; done += ROWS_PER_PASS) {
        Product product{};
        product.weights = job.run.at(op.b) + begin * op.b.strides[0] * item;
        product.stride_bytes = op.b.strides[is_row_major ? 0 : 1] * item;
        product.num_outputs = count;
        product.depth = int32_t(depth);
        product.num_rows = int(std::min<int64_t>(ROWS_PER_PASS, rows - done));
        for (int m = 0; m < product.num_rows; m++) x[m] = job.x + (done + m) * job.x_stride;
        product.x = x;
        product.out = sums;
        product.out_stride = MAX_TILE_OUTPUTS;
        const auto& kernels = job.run.kernels;
        (is_row_major ? kernels.dot_rows : kernels.sum_columns)[op.b.dtype](product);
        const float* bias =
            op.c.dtype == HR_NO_VALUE
                ? nullptr
                : widen_values<float>(
                      op.c.dtype,
                      job.run.at(op.c) + begin * op.c.strides[0] * bytes_of(op.c.dtype),
                      op.c.strides[0], count, biases);
        for (int m = 0; m < product.num_rows; m++) {
            float* row = sums + m * MAX_TILE_OUTPUTS;
            if (bias)
                for (int i = 0; i < count; i++) row[i] += bias[i];
            char* out = job.run.at(op.out) +
                        ((done + m) * op.out.strides[0] + begin * op.out.strides[1]) * out_item;
            narrow_values<float>(op.out.dtype, out, op.out.strides[1], count, row);
        }
    }
}

struct AttendJob {
    const DenseRun& run;
    const HrOp& op;
    const HrCacheLayer& cache;
    int64_t first;    // position seen first
    int64_t num_seen;
    int64_t group;       // heads of queries per head of keys
    int64_t dim_padded;
    const float* queries;  // [heads, dim_padded]
    float* scores;         // [heads, scores_stride]
    int64_t scores_stride;
    float* results;  // [heads, value dim]
    const float* sinks;
};

void run_attend_tile(void* context, int64_t head, int64_t) {
    AttendJob& job = *static_cast<AttendJob*>(context);
    const HrOp& op = job.op;
    const int64_t dim = op.sizes[2], value_dim = op.sizes[3];
    const int64_t item = bytes_of(op.b.dtype), num_seen = job.num_seen;
    char* keys = static_cast<char*>(job.cache.keys) + head * job.cache.key_head_stride * item;
    char* values = static_cast<char*>(job.cache.values) + head * job.cache.value_head_stride * item;
    const char* new_key = job.run.at(op.b) + head * op.b.strides[0] * item;
    const char* new_value = job.run.at(op.c) + head * op.c.strides[0] * item;
    char* key_place = keys + job.cache.end * dim * item;
    char* value_place = values + job.cache.end * value_dim * item;
    for (int64_t i = 0; i < dim; i++)
        memcpy(key_place + i * item, new_key + i * op.b.strides[1] * item, size_t(item));
    for (int64_t i = 0; i < value_dim; i++)
        memcpy(value_place + i * item, new_value + i * op.c.strides[1] * item, size_t(item));

    const int64_t first_head = head * job.group;
    const float* rows[ROWS_PER_PASS];
    for (int64_t done = 0; done < job.group; done += ROWS_PER_PASS) {
        const int num_rows = int(std::min<int64_t>(ROWS_PER_PASS, job.group - done));
        const int64_t row = first_head + done;
        for (int m = 0; m < num_rows; m++) rows[m] = job.queries + (row + m) * job.dim_padded;
        Product product{};
        product.weights = keys + job.first * dim * item;
        product.stride_bytes = dim * item;
        product.num_outputs = int32_t(num_seen);
        product.depth = int32_t(dim);
        product.x = rows;
        product.num_rows = num_rows;
        product.out = job.scores + row * job.scores_stride;
        product.out_stride = job.scores_stride;
        job.run.kernels.dot_rows[op.b.dtype](product);
        float totals[ROWS_PER_PASS];
        for (int m = 0; m < num_rows; m++) {
            float* scores = job.scores + (row + m) * job.scores_stride;
            const float scale = float(op.x);
            for (int64_t i = 0; i < num_seen; i++) scores[i] *= scale;
            float greatest = *std::max_element(scores, scores + num_seen);
            if (job.sinks) greatest = std::max(greatest, job.sinks[row + m]);
            float sums[NUM_LANES] = {};
            for (int64_t i = 0; i < num_seen; i++) scores[i] = exponential(scores[i] - greatest);
            int64_t i = 0;
            for (; i + NUM_LANES <= num_seen; i += NUM_LANES)
                for (int j = 0; j < NUM_LANES; j++) sums[j] += scores[i + j];
            for (int j = 0; i + j < num_seen; j++) sums[j] += scores[i + j];
            for (int half = NUM_LANES / 2; half > 0; half /= 2)
                for (int j = 0; j < half; j++) sums[j] += sums[j + half];
            totals[m] = sums[0];
            if (job.sinks) totals[m] += exponential(job.sinks[row + m] - greatest);
            rows[m] = scores;
        }
        product.weights = values + job.first * value_dim * item;
        product.stride_bytes = value_dim * item;
        product.num_outputs = int32_t(value_dim);
        product.depth = int32_t(num_seen);
        product.out = job.results + row * value_dim;
        product.out_stride = value_dim;
        job.run.kernels.sum_columns[op.c.dtype](product);
        const int64_t out_item = bytes_of(op.out.dtype);
        for (int m = 0; m < num_rows; m++) {
            float* result = job.results + (row + m) * value_dim;
            for (int64_t i = 0; i < value_dim; i++) result[i] /= totals[m];
            narrow_values<float>(op.out.dtype,
                                 job.run.at(op.out) + (row + m) * op.out.strides[0] * out_item,
                                 op.out.strides[1], int(value_dim), result);
        }
    }
}

// [rows, width] as float32 rows of `stride` values, zeros beyond `width`.
void widen_rows(const DenseRun& run, const HrOperand& operand, int64_t num_rows, int64_t width,
                float* target, int64_t stride) {
    for (int64_t row = 0; row < num_rows; row++) {
        float* to = target + row * stride;
        const char* from =
            run.at(operand) + row * operand.strides[0] * bytes_of(operand.dtype);
        const float* values =
            widen_values<float>(operand.dtype, from, operand.strides[1], int(width), to);
        if (values != to) std::copy(values, values + width, to);
        std::fill(to + width, to + stride, 0.0f);
    }
}

}  // namespace

void run_linear(const DenseRun& run, const HrOp* ops, int num_ops) {
    const HrOp& op = ops[0];
    const int64_t rows = op.sizes[0], depth = op.sizes[2];
    const int64_t stride = round_up(depth, NUM_LANES);
    float* x = run.pool.hidden.values.items(rows * stride);
    widen_rows(run, op.a, rows, depth, x, stride);
    int64_t outputs = 0;
    for (int i = 0; i < num_ops; i++) outputs += ops[i].sizes[1];
    const int64_t output_bytes = std::max<int64_t>(depth * bytes_of(op.b.dtype), 1);
    const int num_threads = useful_threads(run.pool, outputs * output_bytes);
    const int64_t bytes = job_tile_bytes(outputs * output_bytes, num_threads, MOST_TILE_BYTES);
    LinearJob job{run, ops, x, stride,
                  std::min<int64_t>(round_up(std::max<int64_t>(bytes / output_bytes, 1), 16),
                                    MAX_TILE_OUTPUTS),
                  {}};
    for (int i = 0; i < num_ops; i++)
        job.tiles.add((ops[i].sizes[1] + job.tile_outputs - 1) / job.tile_outputs);
    run.pool.threads.run(job.tiles.count(), num_threads, run_linear_tile, &job);
}

void run_attend(const DenseRun& run, const HrOp& op) {
    const int64_t heads = op.sizes[0], key_heads = op.sizes[1];
    const HrCacheLayer& cache = run.caches[op.n];
    const int64_t first =
        cache.window > 0 ? std::max<int64_t>(0, cache.end - cache.window + 1) : 0;
    AttendJob job{run, op, cache, first, cache.end + 1 - first, heads / key_heads,
                  round_up(op.sizes[2], NUM_LANES), nullptr, nullptr, 0, nullptr,
                  reinterpret_cast<const float*>(op.m)};
    job.scores_stride = round_up(job.num_seen, NUM_LANES);
    float* queries = run.pool.hidden.values.items(heads * (job.dim_padded + op.sizes[3]));
    widen_rows(run, op.a, heads, op.sizes[2], queries, job.dim_padded);
    job.queries = queries;
    job.results = queries + heads * job.dim_padded;
    job.scores = run.pool.middle.values.items(heads * job.scores_stride);
    const int64_t num_bytes =
        key_heads * job.num_seen * (op.sizes[2] + op.sizes[3]) * bytes_of(op.b.dtype);
    run.pool.threads.run(key_heads, useful_threads(run.pool, num_bytes), run_attend_tile, &job);
}
