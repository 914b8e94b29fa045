// Linear layers whose weights are quantised, in tiles of 16 outputs (packed.h).
//
// Rows are quantised as those of experts are, before the job; a tile of the job is a stretch of the
// matrix's tiles. What a row gives does not hang on the rows beside it, so prompts and single tokens
// compute one function.

#include <algorithm>

#include "dense_values.h"
#include "packed.h"
#include "step_job.h"

namespace {

constexpr int64_t MOST_TILE_BYTES = 128 * 1024;
constexpr int STREAMS = 8;  // the kernels read up to so many of the matrix's tiles side by side
constexpr int MAX_OUTPUTS = 256;
constexpr int ROWS_PER_PASS = 64;

struct PackedLinearJob {
    const DenseRun& run;
    const HrOp* ops;
    const PackedFormat& format;
    int64_t tile_bytes;
    int64_t tiles_per_job_tile;
    const PackedRow* rows;
    JoinedTiles tiles;
};

int64_t num_tiles_of(const HrOp& op) { return (op.sizes[1] + TILE_OUTPUTS - 1) / TILE_OUTPUTS; }

// Where the weights of a tile of the job lie.
PackedTiles tiles_of(const PackedLinearJob& job, int64_t number) {
    const int matrix = job.tiles.matrix_of(number);
    const HrOp& op = job.ops[matrix];
    const int64_t first = (number - job.tiles.begin[matrix]) * job.tiles_per_job_tile;
    return {reinterpret_cast<const char*>(op.m) + first * job.tile_bytes, job.tile_bytes,
            int32_t(std::min(job.tiles_per_job_tile, num_tiles_of(op) - first))};
}

void run_packed_tile(void* context, int64_t number, int64_t next) {
    const PackedLinearJob& job = *static_cast<const PackedLinearJob*>(context);
    const int matrix = job.tiles.matrix_of(number);
    const HrOp& op = job.ops[matrix];
    const int64_t num_rows = op.sizes[0], outputs = op.sizes[1];
    const int64_t begin =
        (number - job.tiles.begin[matrix]) * job.tiles_per_job_tile * TILE_OUTPUTS;
    PackedProduct product{};
    const PackedTiles tiles = tiles_of(job, number);
    product.tiles = tiles.begin;
    product.tile_bytes = tiles.tile_bytes;
    product.num_tiles = tiles.count;
    if (next >= 0) product.next = tiles_of(job, next);
    const int count = int(std::min<int64_t>(tiles.count * TILE_OUTPUTS, outputs - begin));
    const int64_t out_item = bytes_of(op.out.dtype);
    alignas(64) float sums[ROWS_PER_PASS * MAX_OUTPUTS];
    float biases[MAX_OUTPUTS];
    const float* bias = nullptr;
    if (op.c.dtype != HR_NO_VALUE)
        bias = widen_values<float>(
            op.c.dtype, job.run.at(op.c) + begin * op.c.strides[0] * bytes_of(op.c.dtype),
            op.c.strides[0], count, biases);
    product.format = &job.format;
    product.num_groups = int32_t(packed_groups(job.format, op.sizes[2]));
    product.out = sums;
    product.out_stride = MAX_OUTPUTS;
    for (int64_t done = 0; done < num_rows; done += ROWS_PER_PASS) {
        product.rows = job.rows + done;
        product.num_rows = int32_t(std::min<int64_t>(ROWS_PER_PASS, num_rows - done));
        job.run.packed.multiply[job.format.kind - 1](product);
        for (int m = 0; m < product.num_rows; m++) {
            float* row = sums + m * MAX_OUTPUTS;
            if (bias)
                for (int i = 0; i < count; i++) row[i] += bias[i];
            char* out = job.run.at(op.out) +
                        ((done + m) * op.out.strides[0] + begin * op.out.strides[1]) * out_item;
            narrow_values<float>(op.out.dtype, out, op.out.strides[1], count, row);
        }
    }
}

bool format_of(const HrOp& op, PackedFormat& format) {
    HrForm form{};
    form.kind = int32_t(op.n & 0xff);
    form.scale = int32_t(op.n >> 8 & 0xff);
    form.has_zero_points = int32_t(op.n >> 16 & 0xff);
    form.group_size = int32_t(op.n >> 24);
    return find_packed_format(form, format);
}

}  // namespace

int64_t packed_linear_bytes(const HrOp& op) {
    PackedFormat format;
    return format_of(op, format) ? num_tiles_of(op) * packed_tile_bytes(format, op.sizes[2]) : 0;
}

bool run_packed_linear(const DenseRun& run, const HrOp* ops, int num_ops) {
    const HrOp& op = ops[0];
    PackedFormat format;
    if (!format_of(op, format)) return false;
    const int64_t num_rows = op.sizes[0], depth = op.sizes[2];
    const int64_t num_groups = packed_groups(format, depth);
    const int64_t width = num_groups * format.group_size;
    const bool has_codes = format.kind != HR_FP8;
    RowScratch& scratch = run.pool.hidden;
    float* values = scratch.values.items(num_rows * width);
    int16_t* codes = has_codes ? scratch.codes.items(num_rows * width) : nullptr;
    float* scales = has_codes ? scratch.scales.items(num_rows * num_groups) : nullptr;
    int32_t* sums = has_codes ? scratch.sums.items(num_rows * num_groups) : nullptr;
    PackedRow* rows = scratch.rows.items(num_rows);
    const int64_t item = bytes_of(op.a.dtype);
    for (int64_t r = 0; r < num_rows; r++) {
        float* to = values + r * width;
        const char* from = run.at(op.a) + r * op.a.strides[0] * item;
        const float* found =
            widen_values<float>(op.a.dtype, from, op.a.strides[1], int(depth), to);
        if (found != to) std::copy(found, found + depth, to);
        std::fill(to + depth, to + width, 0.0f);
        rows[r] = {nullptr, nullptr, nullptr, to};
        if (!has_codes) continue;
        rows[r] = {codes + r * width, scales + r * num_groups, sums + r * num_groups, to};
        quantise_row(run.packed, format, to, num_groups, codes + r * width,
                     scales + r * num_groups, sums + r * num_groups);
    }
    const int64_t tile_bytes = packed_tile_bytes(format, depth);
    int64_t num_bytes = 0;
    for (int i = 0; i < num_ops; i++) num_bytes += num_tiles_of(ops[i]) * tile_bytes;
    const int num_threads = useful_threads(run.pool, num_bytes);
    const int64_t wanted_bytes = job_tile_bytes(num_bytes, num_threads, MOST_TILE_BYTES);
    const int64_t wanted = round_up(std::max<int64_t>(wanted_bytes / tile_bytes, 1), STREAMS);
    PackedLinearJob job{run,
                        ops,
                        format,
                        tile_bytes,
                        std::min<int64_t>(wanted, MAX_OUTPUTS / TILE_OUTPUTS),
                        rows,
                        {}};
    for (int i = 0; i < num_ops; i++)
        job.tiles.add((num_tiles_of(ops[i]) + job.tiles_per_job_tile - 1) / job.tiles_per_job_tile);
    run.pool.threads.run(job.tiles.count(), num_threads, run_packed_tile, &job);
    return true;
}
