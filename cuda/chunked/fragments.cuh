// Products whose left factor stays in a warp's registers, for chains of products.
//
// A fragment is a (16, 8 N) part of a matrix, spread over a warp like the accumulators of N mma.sync instructions side
// by side. In the PTX manual's layouts accumulators and left factors lie in the same lanes, so that the result of one
// product is the left factor of the next without a barrier. Right factors come from shared memory. State passing works
// on transposed matrices: a fragment has 16 value columns.
#pragma once

#include "shared_memory.cuh"

namespace fairseq_fastweights {

// Exchanges 16-bit numbers between pairs of lanes. Four lanes have 16 numbers of a row, each a pair of the first 8 and
// a pair of the others; afterwards each has four neighbours, so that a store fills a whole 32-byte sector.
// first_of_four: the index of a lane's first.
DEVICE uint2 neighbours_of(unsigned one, unsigned two) {
    const bool odd = warp_lane() % 2;
    const unsigned other = __shfl_xor_sync(kAllLanes, odd ? one : two, 1);
    return make_uint2(odd ? other : one, odd ? two : other);
}
DEVICE int first_of_four() { return warp_lane() % 2 * 8 + warp_lane() % 4 / 2 * 4; }

// Elements are float32 or, for a left factor loaded from a 16-bit sequence, of its type, two to a register.
template <int N, typename T = float>
struct Fragment {
    using Element = T;
    static constexpr int kColumnTiles = N, kPerRegister = 4 / sizeof(T);
    std::conditional_t<kPerRegister == 1, float, unsigned> value[N / kPerRegister][4];

    DEVICE void clear() {
        each([](int, int, float& x) { x = 0.0f; });
    }

    // The columns 8 `first` to 8 (first + M).
    template <int M>
    DEVICE Fragment<M, T>& part(int first) {
        return reinterpret_cast<Fragment<M, T>&>(value[first / kPerRegister]);
    }

    // f(inner index, row, float& x, float& y) for neighbours (row, inner) and (row, inner + 1).
    template <typename Function>
    DEVICE void each_pair(Function f) {
        const int lane_row = warp_lane() / 4, lane_pair = warp_lane() % 4;
        UNROLL_FOR (int n = 0; n < N; ++n)
            UNROLL_FOR (int half = 0; half < 2; ++half)
                f(8 * n + 2 * lane_pair, lane_row + 8 * half, value[n][2 * half], value[n][2 * half + 1]);
    }

    // f(inner index, row, float& value) for this lane's elements, column tiles of 8 one after another.
    template <typename Function>
    DEVICE void each(Function f) {
        each_pair([&](int place, int j, float& x, float& y) { f(place, j, x), f(place + 1, j, y); });
    }

    // f(float& value, other value) with the elements of another fragment.
    template <typename Function>
    DEVICE void each_with(const Fragment& other, Function f) {
        UNROLL_FOR (int n = 0; n < N; ++n)
            UNROLL_FOR (int i = 0; i < 4; ++i) f(value[n][i], other.value[n][i]);
    }

    // Scales each inner index by a number of its own, in shared memory.
    DEVICE void scale(const float* by_place) {
        each_pair([&](int place, int, float& x, float& y) {
            const float2 by = *reinterpret_cast<const float2*>(by_place + place);
            x *= by.x;
            y *= by.y;
        });
    }

    DEVICE void scale(float by) {
        each([&](int, int, float& x) { x *= by; });
    }

    // The remainder after rounding to To: the low half of a split into two numbers of 16 bits.
    template <typename To>
    DEVICE Fragment low_half() const {
        Fragment left = *this;
        left.each_pair([](int, int, float& x, float& y) {
            const Pair<To> pair = narrow_pair<To>(x, y);
            x -= widen<float>(pair.x);
            y -= widen<float>(pair.y);
        });
        return left;
    }

    // From shared memory, stored as (inner, column): columns `column` and on.
    DEVICE void load(const Matrix<T>& from, int column) {
        const int lane = warp_lane(), matrix_row = lane % 8, second = lane / 8 % 2 * 8, third = lane / 16 * 8;
        if constexpr (kPerRegister == 1)
            each([&](int place, int j, float& x) { x = from(place, column + j); });
        else
            UNROLL_FOR (int e = 0; e < N / 2; ++e)
                load_matrices<true>(value[e], &from(16 * e + third + matrix_row, column + second));
    }
    DEVICE Fragment<N> widened() const {
        if constexpr (kPerRegister == 2) {
            Fragment<N> fragment;
            UNROLL_FOR (int i = 0; i < 2 * N; ++i) {
                Pair<T> pair;
                memcpy(&pair, &value[i / 4][i % 4], sizeof(pair));
                fragment.value[i / 2][i % 2 * 2] = widen<float>(pair.x);
                fragment.value[i / 2][i % 2 * 2 + 1] = widen<float>(pair.y);
            }
            return fragment;
        } else {
            return *this;
        }
    }

    // To global memory, a row of `stride` numbers for each fragment row below `rows`; only inner indices below
    // `places`, a multiple of 4.
    template <typename To, typename Stride>
    DEVICE void store(To* to, Stride stride, int places, int rows = kMmaRows) {
        if constexpr (sizeof(To) == 2) {
            static_assert(N % 2 == 0, "two groups of places are exchanged");
            const int lane_row = warp_lane() / 4, first = first_of_four();
            UNROLL_FOR (int half = 0; half < 2; ++half) {
                To* const row = to + (lane_row + 8 * half) * stride + first;
                const int left = lane_row + 8 * half < rows ? places - first : 0;
                UNROLL_FOR (int n = 0; n < N; n += 2) {
                    const float *const x = &value[n][2 * half], *const y = &value[n + 1][2 * half];
                    const uint2 four =
                        neighbours_of(narrow_pair<To>(x[0], x[1]).bits(), narrow_pair<To>(y[0], y[1]).bits());
                    if (8 * n < left) *reinterpret_cast<uint2*>(row + 8 * n) = four;
                }
            }
            return;
        }
        each_pair([&](int place, int j, float& x, float& y) {
            if (place < places && j < rows) put_pair(to + j * stride + place, x, y);
        });
    }

    // To rows of a sequence, `to` beginning at the fragment's first column: fragment row j is step `start` + j.
    template <typename To>
    DEVICE void store_rows(const Head<To>& to, int places, int start, int time) {
        To* const first = to.data + start * to.stride;
        if ((reinterpret_cast<uintptr_t>(first) | to.stride * sizeof(To)) % 8 == 0 && min(places, to.dim) % 4 == 0)
            return store(first, to.stride, min(places, to.dim), time - start);
        each([&](int place, int j, float& x) {
            if (place < min(places, to.dim) && start + j < time) first[j * to.stride + place] = narrow<To>(x);
        });
    }

    // Adds this lane's part of the sums over inner indices of value * by(row, inner), for its two rows.
    template <typename By>
    DEVICE void dot(float (&sums)[2], const By& by) {
        each_pair([&](int place, int j, float x, float y) {
            const auto pair = *reinterpret_cast<const Pair<typename By::Element>*>(&by(j, place));
            sums[j / 8] += x * widen<float>(pair.x) + y * widen<float>(pair.y);
        });
    }

    // To shared memory, a row for each fragment row.
    template <typename To>
    DEVICE void write(const To& to) {
        each_pair([&](int place, int j, float x, float y) { put_pair(&to(j, place), x, y); });
    }
};

// Inner indices 16 e to 16 e + 16 as a left factor of 16 bits, and the low half that rounding leaves.
template <typename T, int N, typename From>
DEVICE void round_left(unsigned (&a)[4], unsigned (&low)[4], const Fragment<N, From>& from, int e) {
    UNROLL_FOR (int i = 0; i < 4; ++i)
        if constexpr (sizeof(From) == 2)
            a[i] = from.value[e][i];
        else {
            const float* const two = &from.value[2 * e + i / 2][i % 2 * 2];
            const Pair<T> pair = narrow_pair<T>(two[0], two[1]);
            a[i] = pair.bits();
            low[i] = narrow_pair<T>(two[0] - widen<float>(pair.x), two[1] - widen<float>(pair.y)).bits();
        }
}

// True if a product takes factors of 16 bits: next to bfloat16, to which left factors are rounded, or if both are
// stored so.
template <typename Left, typename T>
constexpr bool kIn16Bits = kRounded<T> || (sizeof(T) == 2 && sizeof(typename Left::Element) == 2);

// The blocks of a square right factor that are multiplied, of 16 x 16: all, or those (row, column) with row >= column.
enum class Part { kAll, kLower };

// sums += left right. With `RowsInner` the rows of `right` are the inner dimension, else its columns (left right^T).
// With `Split` a left factor that would be rounded to 16 bits is taken as two numbers, high + low. Other products are
// in tf32, in one pass with a right factor that tf32 holds exactly or, with `Rounds`, that is rounded to it.
template <int Passes, bool RowsInner, Part Which = Part::kAll, bool Rounds = false, bool Split = false, int N,
          typename Left, typename Right>
DEVICE void multiply_fragment(Fragment<N>& sums, const Left& left, const Right& right) {
    using T = typename Right::Element;
    const int lane = warp_lane();
    if constexpr (kIn16Bits<Left, T>) {
        const int matrix_row = lane % 8, second = lane / 8 % 2 * 8, third = lane / 16 * 8;
        UNROLL_FOR (int e = 0; e < Left::kColumnTiles / 2; ++e) {
            unsigned a[4], low[4];
            round_left<T>(a, low, left, e);
            UNROLL_FOR (int n = 0; n < N / 2; ++n) {
                if (Which == Part::kLower && (RowsInner ? e < n : e > n)) continue;
                unsigned b[4];
                load_matrices<RowsInner>(b, RowsInner ? &right(16 * e + second + matrix_row, 16 * n + third)
                                                      : &right(16 * n + third + matrix_row, 16 * e + second));
                UNROLL_FOR (int i = 0; i < 2; ++i) {
                    mma_stored<T>(sums.value[2 * n + i], a, {b[2 * i], b[2 * i + 1]});
                    if constexpr (Split) mma_stored<T>(sums.value[2 * n + i], low, {b[2 * i], b[2 * i + 1]});
                }
            }
        }
    } else {
        const auto& fragment = left.widened();
        const int lane_row = lane / 4, lane_pair = lane % 4;
        UNROLL_FOR (int e = 0; e < Left::kColumnTiles; ++e) {
            const LeftOperand<Passes> factor(fragment.value[e]);
            const int inner = 8 * e + 2 * lane_pair;
            UNROLL_FOR (int n = 0; n < N; ++n) {
                if (Which == Part::kLower && (RowsInner ? e < n : e > n)) continue;
                const int column = 8 * n + lane_row;
                Pair<T> pair;
                if constexpr (RowsInner)
                    pair = {right(inner, column), right(inner + 1, column)};
                else
                    pair = *reinterpret_cast<const Pair<T>*>(&right(column, inner));
                factor.template multiply<Rounds ? Rounding::kNearest : Rounding::kNone>(
                    sums.value[n], widen<float>(pair.x), widen<float>(pair.y));
            }
        }
    }
}

// Registers that wgmma accesses must be written before wgmma.fence and read after the wait. The compiler, to which an
// asm statement is opaque, may move neither across this: else it writes zeros behind the fence, which PTX calls
// undefined.
DEVICE void keep_in_registers(unsigned& x) { FASTWEIGHTS_SM90A((void)x, asm volatile("" : "+r"(x)::"memory")); }
template <int N>
DEVICE void keep_in_registers(Fragment<N>& x) {
    FASTWEIGHTS_SM90A((void)x, x.each([](int, int, float& y) { asm volatile("" : "+f"(y)::"memory"); }));
}

// Starts sums += left right as wgmma, over `inner` blocks of 16 inner indices, `Most` at most, and so many `parts` of
// the left factor: left_of(block, part) is in registers, written before, or a descriptor, of a factor that may be
// `Transposed`.
template <bool RowsInner, bool Transposed, int Most, int N, typename Right, typename Left>
DEVICE void start_wgmma(Fragment<N>& sums, const Right& right, int inner, int parts, Left left_of) {
    // One branch for each count: a branch between instructions would give each a group of its own.
    if constexpr (Most > 1)
        if (inner < Most) return start_wgmma<RowsInner, Transposed, Most - 1>(sums, right, inner, parts, left_of);
    keep_in_registers(sums);
    FASTWEIGHTS_SM90A(emulation::wgmma_fence(), asm volatile("wgmma.fence.sync.aligned;\n" :: : "memory"));
    UNROLL_FOR (int e = 0; e < Most; ++e)
        UNROLL_FOR (int part = 0; part < parts; ++part)
            UNROLL_FOR (int n = 0; n < N; n += kWgmmaColumns / 8)
                wgmma<typename Right::Element, RowsInner, Transposed>(
                    sums.value, n, left_of(e, part), right.template descriptor<RowsInner>(16 * e, 8 * n));
    FASTWEIGHTS_SM90A(emulation::wgmma_commit(), asm volatile("wgmma.commit_group.sync.aligned;\n" :: : "memory"));
}

// Starts sums += left right, of all of the right factor: as wgmma if `warpgroup`, else by each warp at once. Until
// `finish` nobody may touch the sums, except for products that add to them.
template <int Passes, bool RowsInner, bool Split = false, int N, typename Left, typename Right>
DEVICE void start(bool warpgroup, Fragment<N>& sums, const Left& left, const Right& right) {
    using T = typename Right::Element;
    constexpr int M = Left::kColumnTiles;
    if constexpr (kIn16Bits<Left, T> && N % 8 == 0 && M % 8 == 0)
        if (warpgroup) {
            unsigned a[2][M / 2][4];
            UNROLL_FOR (int e = 0; e < M / 2; ++e) round_left<T>(a[0][e], a[1][e], left, e);
            UNROLL_FOR (int i = 0; i < (1 + Split) * M / 2; ++i)
                UNROLL_FOR (unsigned& x : a[i / (M / 2)][i % (M / 2)]) keep_in_registers(x);
            return start_wgmma<RowsInner, false, M / 2>(
                sums, right, M / 2, 1 + Split, [&](int e, int part) -> const unsigned (&)[4] { return a[part][e]; });
        }
    multiply_fragment<Passes, RowsInner, Part::kAll, sizeof(T) == 4, Split>(sums, left, right);
}
template <int N>
DEVICE void finish(bool warpgroup, Fragment<N>& sums) {
    if (!warpgroup) return;
    FASTWEIGHTS_SM90A(emulation::wgmma_wait(0), asm volatile("wgmma.wait_group.sync.aligned 0;\n" :: : "memory"));
    keep_in_registers(sums);
}
template <int Passes, bool RowsInner, bool Split = false, int N, typename Left, typename Right>
DEVICE void multiply(bool warpgroup, Fragment<N>& sums, const Left& left, const Right& right) {
    start<Passes, RowsInner, Split>(warpgroup, sums, left, right);
    finish(warpgroup, sums);
}

}  // namespace fairseq_fastweights
