// Attention of one new token per sequence over KV pages, read where they lie.
//
// A task is a piece of CHUNK positions of one row, with all its heads: keys and values of a position are next to each
// other, so memory is read once and in order. Pieces are merged by their log-sum-exp (Flash-Decoding).
// All arithmetic is float32; numbers of the cache are float32 or bfloat16.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t CHUNK = 256;
constexpr int64_t TILE = 32;

inline float wide(float x) { return x; }
inline float wide(uint16_t x) {
    uint32_t bits = uint32_t(x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}
inline void narrow(float x, float& y) { y = x; }
inline void narrow(float x, uint16_t& y) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    y = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// exp(x) for x <= 0, as a polynomial that becomes vector instructions: the library's would be called number by number.
// The relative error is below 3e-7; below -87 the result stays at 1.6e-38.
inline float exp_negative(float x) {
    x = x < -87.0f ? -87.0f : x;
    const float n = __builtin_rintf(x * 1.44269504f);
    const float f = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    const float p = 1 + f * (1 + f * (1.0f / 2 + f * (1.0f / 6 + f * (1.0f / 24 + f * (1.0f / 120 + f * (1.0f / 720))))));
    const int32_t bits = (int32_t(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return p * power;
}

struct Shape {
    int64_t block, heads, kv_heads, head_dim;
};

// Positions [first, last) of a row: out [heads, head_dim] not yet divided, largest [heads], sum [heads].
// `lines` holds TILE positions as float32 at a time, so that each number is widened once for all heads; with a head_dim
// that is known when this is compiled (SIZE > 0), a head's sums stay in registers over a tile.
template <int SIZE, typename T>
void piece(const float* q, const T* keys, const T* values, const int64_t* pages, Shape s, int64_t first, int64_t last,
           float* out, float* largest, float* sum, float* scores, float* lines) {
    const int64_t size = SIZE > 0 ? SIZE : s.head_dim;
    const int64_t width = s.kv_heads * size, group = s.heads / s.kv_heads, n = last - first;
    const auto widen = [&](const T* memory, int64_t from, int64_t count) {
        for (int64_t i = 0; i < count; i++) {
            const int64_t at = first + from + i;
            const T* numbers = memory + (pages[at / s.block] * s.block + at % s.block) * width;
            float* line = lines + i * width;
            #pragma omp simd
            for (int64_t d = 0; d < width; d++) line[d] = wide(numbers[d]);
        }
    };
    for (int64_t from = 0; from < n; from += TILE) {
        const int64_t count = n - from < TILE ? n - from : TILE;
        widen(keys, from, count);
        for (int64_t h = 0; h < s.heads; h++) {
            const float *a = q + h * size, *b = lines + h / group * size;
            float* row = scores + h * CHUNK + from;
            for (int64_t i = 0; i < count; i++) {
                float dot = 0;
                #pragma omp simd reduction(+ : dot)
                for (int64_t d = 0; d < size; d++) dot += a[d] * b[i * width + d];
                row[i] = dot;
            }
        }
    }
    for (int64_t h = 0; h < s.heads; h++) {
        float* row = scores + h * CHUNK;
        float most = -INFINITY, total = 0;
        #pragma omp simd reduction(max : most)
        for (int64_t i = 0; i < n; i++) most = row[i] > most ? row[i] : most;
        #pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < n; i++) {
            row[i] = exp_negative(row[i] - most);
            total += row[i];
        }
        largest[h] = most;
        sum[h] = total;
    }
    std::memset(out, 0, sizeof(float) * s.heads * size);
    for (int64_t from = 0; from < n; from += TILE) {
        const int64_t count = n - from < TILE ? n - from : TILE;
        widen(values, from, count);
        for (int64_t h = 0; h < s.heads; h++) {
            const float *weights = scores + h * CHUNK + from, *b = lines + h / group * size;
            float* mine = out + h * size;
            if constexpr (SIZE > 0) {
                float held[SIZE];
                for (int64_t d = 0; d < SIZE; d++) held[d] = mine[d];
                for (int64_t i = 0; i < count; i++) {
                    #pragma omp simd
                    for (int64_t d = 0; d < SIZE; d++) held[d] += weights[i] * b[i * width + d];
                }
                for (int64_t d = 0; d < SIZE; d++) mine[d] = held[d];
            } else {
                for (int64_t i = 0; i < count; i++) {
                    #pragma omp simd
                    for (int64_t d = 0; d < size; d++) mine[d] += weights[i] * b[i * width + d];
                }
            }
        }
    }
}

template <typename T>
void attend(const T* q, const T* keys, const T* values, T* out, const int64_t* pages, const int64_t* totals,
            int64_t rows, int64_t table_width, Shape s, int threads) {
    std::vector<int64_t> begins(rows + 1, 0);  // of each row's pieces
    for (int64_t r = 0; r < rows; r++) begins[r + 1] = begins[r] + (totals[r] + CHUNK - 1) / CHUNK;
    const int64_t size = s.heads * s.head_dim, pieces = begins[rows];
    std::vector<int64_t> row_of(pieces);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = begins[r]; i < begins[r + 1]; i++) row_of[i] = r;
    std::vector<float> partial(pieces * size), largest(pieces * s.heads), sum(pieces * s.heads);
    const float scale = 1.0f / std::sqrt(float(s.head_dim));
    #pragma omp parallel num_threads(threads)
    {
        std::vector<float> mine(size), scores(s.heads * CHUNK), lines(TILE * s.kv_heads * s.head_dim);
        #pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < pieces; i++) {
            const int64_t r = row_of[i], first = (i - begins[r]) * CHUNK;
            const int64_t last = first + CHUNK < totals[r] ? first + CHUNK : totals[r];
            for (int64_t d = 0; d < size; d++) mine[d] = wide(q[r * size + d]) * scale;
            const auto run = s.head_dim == 64 ? piece<64, T> : s.head_dim == 128 ? piece<128, T> : piece<0, T>;
            run(mine.data(), keys, values, pages + r * table_width, s, first, last, &partial[i * size],
                &largest[i * s.heads], &sum[i * s.heads], scores.data(), lines.data());
        }
        #pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            for (int64_t h = 0; h < s.heads; h++) {
                float most = -INFINITY, total = 0;
                for (int64_t i = begins[r]; i < begins[r + 1]; i++) most = std::fmax(most, largest[i * s.heads + h]);
                float* merged = mine.data();
                std::memset(merged, 0, sizeof(float) * s.head_dim);
                for (int64_t i = begins[r]; i < begins[r + 1]; i++) {
                    const float share = std::exp(largest[i * s.heads + h] - most);
                    total += share * sum[i * s.heads + h];
                    const float* part = &partial[i * size + h * s.head_dim];
                    #pragma omp simd
                    for (int64_t d = 0; d < s.head_dim; d++) merged[d] += share * part[d];
                }
                for (int64_t d = 0; d < s.head_dim; d++)
                    narrow(total > 0 ? merged[d] / total : 0.0f, out[r * size + h * s.head_dim + d]);
            }
        }
    }
}

}  // namespace

// q, out: [rows, heads, head_dim]. keys, values: [any, block, kv_heads, head_dim]. pages: [rows, table_width], where a
// row's block number i lies. totals: [rows] positions; a row of 0 gives zeros.
extern "C" void paged_attention_float32(const float* q, const float* keys, const float* values, float* out,
                                        const int64_t* pages, const int64_t* totals, int64_t rows, int64_t table_width,
                                        int64_t block, int64_t heads, int64_t kv_heads, int64_t head_dim, int threads) {
    attend(q, keys, values, out, pages, totals, rows, table_width, {block, heads, kv_heads, head_dim}, threads);
}
extern "C" void paged_attention_bfloat16(const uint16_t* q, const uint16_t* keys, const uint16_t* values, uint16_t* out,
                                         const int64_t* pages, const int64_t* totals, int64_t rows, int64_t table_width,
                                         int64_t block, int64_t heads, int64_t kv_heads, int64_t head_dim,
                                         int threads) {
    attend(q, keys, values, out, pages, totals, rows, table_width, {block, heads, kv_heads, head_dim}, threads);
}
