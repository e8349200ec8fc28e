// Products whose left factor stays in a warp's registers, for what goes from product to product in a chain.
//
// A fragment is 16 value columns of a matrix that is taken transposed: (16, 8 N), spread over a warp as the accumulators of N
// products side by side are. As accumulators and left factors of the tensor cores' instructions lie in the same lanes, what
// one product made is the left factor of the next without a barrier; only right factors come from shared memory, as the
// tensors lie there.
#pragma once

#include "shared_memory.cuh"

namespace fairseq_fastweights {

// Exchanges 16 numbers of 16 bits that four lanes have, a pair of the first 8 and one of the others each, in twos, so that a lane
// has four neighbours to write, and four lanes the 32 bytes that memory takes at once; which the first of a lane's is.
DEVICE uint2 neighbours_of(unsigned one, unsigned two) {
    const bool odd = warp_lane() % 2;
    const unsigned other = __shfl_xor_sync(kAllLanes, odd ? one : two, 1);
    return make_uint2(odd ? other : one, odd ? two : other);
}
DEVICE int first_of_four() { return warp_lane() % 2 * 8 + warp_lane() % 4 / 2 * 4; }

// Its numbers are in float32 or, of a sequence's of 16 bits, as they are stored: no left factor needs these in another way.
template <int N, typename T = float>
struct Fragment {
    using Element = T;
    static constexpr int kColumnTiles = N, kPerRegister = 4 / sizeof(T);
    std::conditional_t<kPerRegister == 1, float, unsigned> value[N / kPerRegister][4];

    DEVICE void clear() {
        each([](int, int, float& x) { x = 0.0f; });
    }

    // The 8 M places from 8 `first` on.
    template <int M>
    DEVICE Fragment<M, T>& part(int first) {
        return reinterpret_cast<Fragment<M, T>&>(value[first / kPerRegister]);
    }

    // f(first inner place, column, float& x, float& y) for pairs of neighbouring places.
    template <typename Function>
    DEVICE void each_pair(Function f) {
        const int lane_row = warp_lane() / 4, lane_pair = warp_lane() % 4;
        UNROLL_FOR (int n = 0; n < N; ++n)
            UNROLL_FOR (int half = 0; half < 2; ++half)
                f(8 * n + 2 * lane_pair, lane_row + 8 * half, value[n][2 * half], value[n][2 * half + 1]);
    }

    // f(inner place, column of the fragment, float& value) for this lane's elements, groups of 8 places one after another.
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

    // Each place's elements times a number of its own, in shared memory.
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

    // The rest that rounding to F leaves out.
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

    // From rows of places, in shared memory: columns `column` and on.
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

    // To rows of `stride` places each in global memory, a row for each column that is below `rows`; only places below `places`, a
    // multiple of 4.
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

    // To rows of a sequence, `to` beginning at the fragment's first place: column j is step `start` + j.
    template <typename To>
    DEVICE void store_rows(const Head<To>& to, int places, int start, int time) {
        To* const first = to.data + start * to.stride;
        if ((reinterpret_cast<uintptr_t>(first) | to.stride * sizeof(To)) % 8 == 0 && min(places, to.dim) % 4 == 0)
            return store(first, to.stride, min(places, to.dim), time - start);
        each([&](int place, int j, float& x) {
            if (place < min(places, to.dim) && start + j < time) first[j * to.stride + place] = narrow<To>(x);
        });
    }

    // Adds this lane's part of the sums over places of value * by(column, place), of its two columns.
    template <typename By>
    DEVICE void dot(float (&sums)[2], const By& by) {
        each_pair([&](int place, int j, float x, float y) {
            const auto pair = *reinterpret_cast<const Pair<typename By::Element>*>(&by(j, place));
            sums[j / 8] += x * widen<float>(pair.x) + y * widen<float>(pair.y);
        });
    }

    // To rows of places in shared memory, a row for each column.
    template <typename To>
    DEVICE void write(const To& to) {
        each_pair([&](int place, int j, float x, float y) { put_pair(&to(j, place), x, y); });
    }
};

// 16 places of a fragment, from 16 e on, as a left factor, and what rounding leaves out of them.
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

// True of products of 16 bits: all beside bfloat16, for which left factors are rounded, and those of what is stored so.
template <typename Left, typename T>
constexpr bool kIn16Bits = kRounded<T> || (sizeof(T) == 2 && sizeof(typename Left::Element) == 2);

// Which of a square right factor there is, in 16 x 16 blocks: all of it, or those (row, column) with row >= column.
enum class Part { kAll, kLower };

// sums += left right. With `RowsInner` rows of `right` are the inner places, without they are the columns. With `Split` a left
// factor that is rounded to 16 bits is taken as two numbers, big + rest. Others are in tf32, in one pass with a right factor that
// is exact in it or, with `Rounds`, is rounded to it.
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

// sums += left right by the warpgroup, begun, of `inner` blocks of 16 inner places, `Most` at most, and so many `parts` of the left
// factor: left_of(block, part) is in registers that are written before, or a descriptor of one that may be `Turned`.
template <bool RowsInner, bool Transposed, int Most, int N, typename Right, typename Left>
DEVICE void start_wgmma(Fragment<N>& sums, const Right& right, int inner, int parts, Left left_of) {
    FASTWEIGHTS_SM90A(emulation::wgmma_fence(), asm volatile("wgmma.fence.sync.aligned;\n" :: : "memory"));
    UNROLL_FOR (int e = 0; e < Most; ++e) {
        if (e >= inner) break;
        UNROLL_FOR (int part = 0; part < parts; ++part)
            UNROLL_FOR (int n = 0; n < N; n += kWgmmaColumns / 8)
                wgmma<typename Right::Element, RowsInner, Transposed>(
                    sums.value, n, left_of(e, part), right.template descriptor<RowsInner>(16 * e, 8 * n));
    }
    FASTWEIGHTS_SM90A(emulation::wgmma_commit(), asm volatile("wgmma.commit_group.sync.aligned;\n" :: : "memory"));
}

// The same as `multiply_fragment`, of all of the right factor, begun: by the warpgroup, if the block's fragments are `grouped` by
// fours, else by each warp. Until `finish` nobody may touch the sums, but for products that add to them too.
template <int Passes, bool RowsInner, bool Split = false, int N, typename Left, typename Right>
DEVICE void start(bool warpgroup, Fragment<N>& sums, const Left& left, const Right& right) {
    using T = typename Right::Element;
    constexpr int M = Left::kColumnTiles;
    if constexpr (kIn16Bits<Left, T> && N % 8 == 0 && M % 8 == 0)
        if (warpgroup) {
            unsigned a[2][M / 2][4];
            UNROLL_FOR (int e = 0; e < M / 2; ++e) round_left<T>(a[0][e], a[1][e], left, e);
            return start_wgmma<RowsInner, false, M / 2>(
                sums, right, M / 2, 1 + Split, [&](int e, int part) -> const unsigned (&)[4] { return a[part][e]; });
        }
    multiply_fragment<Passes, RowsInner, Part::kAll, sizeof(T) == 4, Split>(sums, left, right);
}
template <int N>
DEVICE void finish(bool warpgroup, Fragment<N>& sums) {
    if (!warpgroup) return;
    FASTWEIGHTS_SM90A(emulation::wgmma_wait(0), asm volatile("wgmma.wait_group.sync.aligned 0;\n" :: : "memory");
                      sums.each([](int, int, float& x) { asm volatile(""
                                                                      : "+f"(x)::"memory"); }));  // not read before
}
template <int Passes, bool RowsInner, bool Split = false, int N, typename Left, typename Right>
DEVICE void multiply(bool warpgroup, Fragment<N>& sums, const Left& left, const Right& right) {
    start<Passes, RowsInner, Split>(warpgroup, sums, left, right);
    finish(warpgroup, sums);
}

}  // namespace fairseq_fastweights
