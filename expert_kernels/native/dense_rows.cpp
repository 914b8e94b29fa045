// Sums, softmax, norms and choices along the last dimension; reading and writing by index.
//
// A sum of n values has 16 partial sums, value k goes to sum k % 16 in ascending k, then the halves
// are added up, as in kernels.h: the order hangs on n alone.

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "dense_values.h"
#include "exponential.h"
#include "kernels.h"

namespace {

template <class T>
T add_lanes(T (&sums)[NUM_LANES]) {
    for (int half = NUM_LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    return sums[0];
}

template <class T>
T sum_of(const T* values, int64_t count) {
    T sums[NUM_LANES] = {};
    int64_t k = 0;
    for (; k + NUM_LANES <= count; k += NUM_LANES)
        for (int i = 0; i < NUM_LANES; i++) sums[i] += values[k + i];
    for (int i = 0; k + i < count; i++) sums[i] += values[k + i];
    return add_lanes(sums);
}

// A row of `count` values, all of them widened.
template <class T>
class Row {
  public:
    explicit Row(int64_t count) : buffer_(size_t(count)) {}
    T* take(int16_t dtype, const char* source, int64_t stride) {
        const int count = int(buffer_.size());
        const T* values = widen_values<T>(dtype, source, stride, count, buffer_.data());
        if (values != buffer_.data()) std::copy(values, values + count, buffer_.data());
        return buffer_.data();
    }

  private:
    std::vector<T> buffer_;
};

template <class T>
void run_sum(const DenseRun& run, const HrOp& op) {
    const int inner = op.num_dims - 1;
    const int64_t width = op.sizes[inner], stride = op.a.strides[inner];
    const int64_t item = bytes_of(op.a.dtype), out_item = bytes_of(op.out.dtype);
    const HrOperand* const operands[2] = {&op.out, &op.a};
    T buffer[CHUNK];
    for_each_place(op.sizes, inner, operands, [&](const int64_t* offsets) {
        const char* source = run.at(op.a) + offsets[1] * item;
        T sums[NUM_LANES] = {};
        for (int64_t begin = 0; begin < width; begin += CHUNK) {
            const int count = int(std::min<int64_t>(CHUNK, width - begin));
            const T* values = widen_values<T>(op.a.dtype, source + begin * stride * item, stride,
                                              count, buffer);
            int k = 0;
            for (; k + NUM_LANES <= count; k += NUM_LANES)
                for (int i = 0; i < NUM_LANES; i++) sums[i] += values[k + i];
            for (int i = 0; k + i < count; i++) sums[i] += values[k + i];
        }
        T total = add_lanes(sums);
        if (op.code == HR_OP_MEAN) total /= T(width);
        narrow_values<T>(op.out.dtype, run.at(op.out) + offsets[0] * out_item, 1, 1, &total);
    });
}

void run_max(const DenseRun& run, const HrOp& op) {
    const int inner = op.num_dims - 1;
    Row<float> row(op.sizes[inner]);
    const int64_t item = bytes_of(op.a.dtype), out_item = bytes_of(op.out.dtype);
    const HrOperand* const operands[3] = {&op.out, &op.a, &op.b};
    for_each_place(op.sizes, inner, operands, [&](const int64_t* offsets) {
        const float* values = row.take(op.a.dtype, run.at(op.a) + offsets[1] * item,
                                       op.a.strides[inner]);
        int64_t best = 0;
        for (int64_t i = 1; i < op.sizes[inner] && values[best] == values[best]; i++)
            if (!(values[i] <= values[best])) best = i;
        narrow_values<float>(op.out.dtype, run.at(op.out) + offsets[0] * out_item, 1, 1,
                             values + best);
        run.at<int64_t>(op.b)[offsets[2]] = best;
    });
}

void run_softmax(const DenseRun& run, const HrOp& op) {
    const int inner = op.num_dims - 1;
    const int64_t width = op.sizes[inner];
    Row<float> row(width);
    const int64_t item = bytes_of(op.a.dtype), out_item = bytes_of(op.out.dtype);
    const HrOperand* const operands[2] = {&op.out, &op.a};
    for_each_place(op.sizes, inner, operands, [&](const int64_t* offsets) {
        float* values = row.take(op.a.dtype, run.at(op.a) + offsets[1] * item,
                                 op.a.strides[inner]);
        const float greatest = *std::max_element(values, values + width);
        for (int64_t i = 0; i < width; i++) {
            const float below = values[i] - greatest;
            // Far below the greatest there is nothing, as there is for what was masked out.
            values[i] = below < -87.0f ? 0.0f : exponential(below);
        }
        const float total = sum_of(values, width);
        for (int64_t i = 0; i < width; i++) values[i] /= total;
        narrow_values<float>(op.out.dtype, run.at(op.out) + offsets[0] * out_item,
                             op.out.strides[inner], int(width), values);
    });
}

void run_layer_norm(const DenseRun& run, const HrOp& op) {
    const int inner = op.num_dims - 1;
    const int64_t width = op.sizes[inner];
    Row<float> row(width), weights(width), biases(width);
    const int64_t item = bytes_of(op.a.dtype), out_item = bytes_of(op.out.dtype);
    const bool has_weight = op.b.dtype != HR_NO_VALUE, has_bias = op.c.dtype != HR_NO_VALUE;
    const float* weight =
        has_weight ? weights.take(op.b.dtype, run.at(op.b), op.b.strides[inner]) : nullptr;
    const float* bias =
        has_bias ? biases.take(op.c.dtype, run.at(op.c), op.c.strides[inner]) : nullptr;
    std::vector<float> squares{std::vector<float>(size_t(width))};
    const HrOperand* const operands[2] = {&op.out, &op.a};
    for_each_place(op.sizes, inner, operands, [&](const int64_t* offsets) {
        float* values = row.take(op.a.dtype, run.at(op.a) + offsets[1] * item,
                                 op.a.strides[inner]);
        const float mean = sum_of(values, width) / float(width);
        for (int64_t i = 0; i < width; i++) {
            values[i] -= mean;
            squares[size_t(i)] = values[i] * values[i];
        }
        const float variance = sum_of(squares.data(), width) / float(width);
        const float scale = 1.0f / std::sqrt(variance + float(op.x));
        for (int64_t i = 0; i < width; i++)
            values[i] = values[i] * scale * (weight ? weight[i] : 1.0f) + (bias ? bias[i] : 0.0f);
        narrow_values<float>(op.out.dtype, run.at(op.out) + offsets[0] * out_item,
                             op.out.strides[inner], int(width), values);
    });
}

// torch's choice among equal values is what the standard library's selection leaves in front: the
// same algorithm on the same pairs.
void run_topk(const DenseRun& run, const HrOp& op) {
    using Pair = std::pair<float, int64_t>;
    const int inner = op.num_dims - 1;
    const int64_t width = op.sizes[inner], k = op.n;
    Row<float> row(width);
    std::vector<Pair> queue{std::vector<Pair>(size_t(width))};
    const auto is_before = [is_greatest = (op.m & 1) != 0](const Pair& x, const Pair& y) {
        const bool x_is_none = x.first != x.first, y_is_none = y.first != y.first;
        return is_greatest ? (x_is_none && !y_is_none) || x.first > y.first
                           : (!x_is_none && y_is_none) || x.first < y.first;
    };
    const int64_t item = bytes_of(op.a.dtype), out_item = bytes_of(op.out.dtype);
    const HrOperand* const operands[3] = {&op.out, &op.a, &op.b};
    for_each_place(op.sizes, inner, operands, [&](const int64_t* offsets) {
        const float* values = row.take(op.a.dtype, run.at(op.a) + offsets[1] * item,
                                       op.a.strides[inner]);
        for (int64_t i = 0; i < width; i++) queue[size_t(i)] = {values[i], i};
        if (k * 64 <= width) {
            std::partial_sort(queue.begin(), queue.begin() + k, queue.end(), is_before);
        } else {
            std::nth_element(queue.begin(), queue.begin() + k - 1, queue.end(), is_before);
            if (op.m & 2) std::sort(queue.begin(), queue.begin() + k - 1, is_before);
        }
        char* out = run.at(op.out) + offsets[0] * out_item;
        for (int64_t i = 0; i < k; i++) {
            narrow_values<float>(op.out.dtype, out + i * op.out.strides[inner] * out_item, 1, 1,
                                 &queue[size_t(i)].first);
            run.at<int64_t>(op.b)[offsets[2] + i * op.b.strides[inner]] = queue[size_t(i)].second;
        }
    });
}

void copy_item(char* target, const char* source, int64_t item) {
    memcpy(target, source, size_t(item));
}

}  // namespace

void run_rows(const DenseRun& run, const HrOp& op) {
    switch (op.code) {
        case HR_OP_SUM:
        case HR_OP_MEAN:
            return op.a.dtype == HR_VALUE_INT64 ? run_sum<double>(run, op)
                                                : run_sum<float>(run, op);
        case HR_OP_MAX: return run_max(run, op);
        case HR_OP_SOFTMAX: return run_softmax(run, op);
        case HR_OP_LAYER_NORM: return run_layer_norm(run, op);
        default: return run_topk(run, op);
    }
}

void run_indexed(const DenseRun& run, const HrOp& op) {
    const int64_t item = bytes_of(op.out.dtype);
    if (op.code == HR_OP_EMBEDDING) {
        for (int64_t i = 0; i < op.sizes[0]; i++)
            memcpy(run.at(op.out) + i * op.out.strides[0] * item,
                   run.at(op.a) +
                       run.at<int64_t>(op.b)[i * op.b.strides[0]] * op.a.strides[0] * item,
                   size_t(op.sizes[1] * item));
        return;
    }
    const int64_t dim = op.m;
    if (op.code == HR_OP_GATHER) {
        HrOperand others = op.a;  // along `dim` the index says where
        others.strides[dim] = 0;
        const HrOperand* const operands[3] = {&op.out, &others, &op.b};
        for_each_place(op.sizes, op.num_dims, operands, [&](const int64_t* offsets) {
            const int64_t index = run.at<int64_t>(op.b)[offsets[2]];
            copy_item(run.at(op.out) + offsets[0] * item,
                      run.at(op.a) + (offsets[1] + index * op.a.strides[dim]) * item, item);
        });
        return;
    }
    HrOperand others = op.out;
    others.strides[dim] = 0;
    const float value = float(op.x);
    const HrOperand* const operands[2] = {&others, &op.b};
    for_each_place(op.sizes, op.num_dims, operands, [&](const int64_t* offsets) {
        const int64_t index = run.at<int64_t>(op.b)[offsets[1]];
        narrow_values<float>(op.out.dtype,
                             run.at(op.out) + (offsets[0] + index * op.out.strides[dim]) * item, 1,
                             1, &value);
    });
}
