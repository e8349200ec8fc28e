"""Puts faults into the compiled kernels, one at a time, and counts those that the tests notice.

    python tools/kernel_faults.py [cpu|cuda] [--files WORD] [--jobs N] [--out FILE]

Each fault is a file, a piece of its text and what stands there instead. Faults of `cpu/` are compiled for the best
instruction set of this processor and tried against `tests/ops`; those of `cuda/` are compiled for the emulator and
tried against `tests/cuda`: against the tests that `make test-fast` runs first, then against the others. A fault whose
text is not there any more, or stands there twice, is an error, so that the table keeps up with the kernels; so are
fast tests that fail without a fault.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import native_build
from native_toolchain import Torch

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "kernel-faults"
LONGEST = 20 * 60
"""Seconds that a run of tests may take: a fault that hangs is one that was noticed."""
MARKS = {"fast": "not slow and not emulated", "slow": "slow or emulated"}


@dataclass(frozen=True)
class Fault:
    path: str
    text: str
    instead: str

    def apply(self, root: Path) -> None:
        """Changes the file below `root`. Raises `ValueError` unless the text is there once."""
        path = root / self.path
        source = path.read_text()
        if source.count(self.text) != 1:
            raise ValueError(f"{self.path} has {self.text!r} {source.count(self.text)} times; it must be there once")
        path.write_text(source.replace(self.text, self.instead))


def without(path: str, text: str) -> Fault:
    return Fault(path, text, "")


CPU = (
    # Chunks of the diagonal rules
    Fault(
        "cpu/chunked/scores.h",
        "prefix[i] = product *= gate[i]",
        "product *= gate[i], prefix[i] = i ? prefix[i - 1] : 1",
    ),
    Fault(
        "cpu/chunked/scores.h",
        "            suffix[i] = product;\n            product *= gate[i];",
        "            product *= gate[i];\n            suffix[i] = product;",
    ),
    without("cpu/chunked/diagonal.h", "            mask_scores(d_scores);\n"),
    Fault(
        "cpu/chunked/diagonal.h",
        "                d_log[i] += total;\n                total += dot",
        "                d_log[i] += total += dot",
    ),
    without("cpu/chunked/diagonal.h", "            for (index_t i = 0; i < rows_; ++i) d_log[i] += total;\n"),
    Fault("cpu/chunked/diagonal.h", "if (f.gate) row_sums[e]", "if (f.gate && e + 1 < K) row_sums[e]"),
    Fault("cpu/chunked/levels.h", "for (index_t i = (rows - 1) * ld + m;", "for (index_t i = (rows - 2) * ld + m;"),
    Fault("cpu/chunked/scores.h", "for (index_t u = 1; u <= t; ++u)", "for (index_t u = 1; u < t; ++u)"),
    Fault("cpu/chunked/diagonal.h", "f.total(), z.total()}", "f.total(), nullptr}"),
    Fault(
        "cpu/chunked/diagonal.h",
        "            if (p_.complement) {\n                if (plain_k)",
        "            if (false) {\n                if (plain_k)",
    ),
    # Chunks of the delta rule
    Fault("cpu/chunked/delta.h", "if (!transposed && t > s) row[t] -=", "if (!transposed && t > s) row[t] +="),
    Fault("cpu/chunked/delta.h", "transposed ? 0 : s + 1;", "transposed ? 0 : s + 2;"),
    Fault("cpu/chunked/delta.h", "dot(right + i * Vp, v + i * Vp, Vp) -", "dot(right + i * Vp, v + i * Vp, Vp) +"),
    without(
        "cpu/chunked/delta.h",
        "        if (!d_empty) product<false, Into::add>(rows_, Vp, K, right, Vp, leaving(), Kp, d_state, Vs);\n",
    ),
    without(
        "cpu/chunked/delta.h",
        "        product<true, Into::add, Shape::upper>(rows_, Kp, rows_, dk, Kp, d_products, CHUNK, e, Kp);\n",
    ),
    # With decays and erase keys
    Fault("cpu/chunked/delta.h", "decayed(e, scaled_e), Kp, state, Vs);", "e, Kp, state, Vs);"),
    Fault("cpu/chunked/delta.h", "decayed(q, scaled_q), Kp, state, Vs);", "q, Kp, state, Vs);"),
    Fault(
        "cpu/chunked/delta.h",
        "shared.prefix[CHUNK - 1] : real(1), f.total(), nullptr}",
        "real(1) : real(1), f.total(), nullptr}",
    ),
    Fault("cpu/chunked/delta.h", "e + levels::reads(i) * Kp", "k + levels::reads(i) * Kp"),
    without(
        "cpu/chunked/delta.h", "            shared.add_gradient_within_chunk(d_log, products, d_products, rows_);\n"
    ),
    without("cpu/chunked/delta.h", "        add(df, more_f, CHUNK * Kp);\n"),
    without("cpu/chunked/delta.h", "        add_levels(f, true, more_k, e_rows, de, df);\n"),
    without("cpu/chunked/delta.h", "            if (!empty) add_gradient_of_passing(state, d_state);\n"),
    without("cpu/chunked/delta.h", "            return add_prefix_sums(df, scaled_k, more_k, rows_, Kp);\n"),
    Fault("cpu/chunked/levels.h", "s <= t + kept; ++s", "s <= t; ++s"),
    without(
        "cpu/chunked/delta.h",
        "        for (index_t i = 0; i < rows_; ++i) scale(right + i * Vp, right + i * Vp, beta[i], Vp);\n",
    ),
    # The way through a sequence
    without("cpu/sweep.h", "                        chunk.carry(state + size, begins_empty(p, b, t));\n"),
    Fault("cpu/intervals.h", "return t >= p.time ? p.d_final_state == nullptr :", "return t >= p.time ? true :"),
    Fault("cpu/intervals.h", "(t == 0 && p.initial_state == nullptr) ||", "t == 0 ||"),
    # Documents in a row
    Fault("cpu/intervals.h", "rows < most && !starts_at(p, b, t + rows)", "rows < most"),
    Fault("cpu/intervals.h", "t % CHUNK != 0 && !starts_at(p, b, t)", "t % CHUNK != 0"),
    Fault(
        "cpu/sweep.h",
        "{\n                real* state = states + (h - task.first) * size;\n                if (starts_at(p, b, t))",
        "{\n                real* state = states + (h - task.first) * size;\n                if (false)",
    ),
    without("cpu/sweep.h", "                    if (starts_at(p, b, t)) fill(d_state, real(0), size);\n"),
    without("cpu/sweep.h", "                    if (starts_at(p, b, begin)) fill(d_state, real(0), 2 * size);\n"),
    without("cpu/sweep.h", "            transpose(d_state + size, Kp, d_state, Vs, Kp, Vp);\n"),
    # Small states
    Fault("cpu/recurrent/rescaled_spans.h", "constexpr int LARGEST_SUM = 20;", "constexpr int LARGEST_SUM = 200;"),
    without("cpu/recurrent/rescaled_spans.h", "            f.begin(f_logs, first);\n"),
    without("cpu/recurrent/decay_backward.h", "        if (p_.complement) decays.gates.apply(k_copies, rows, Kp);\n"),
    without(
        "cpu/recurrent/decay_backward.h",
        "            if (slot < last) carry(start(few_ ? state : turned, slot), start(nullptr, slot + 1));\n",
    ),
    Fault("cpu/recurrent/decay_backward.h", "m == 0 ? backward_tile", "m != 0 ? backward_tile"),
    without("cpu/recurrent/decay_backward.h", "            multiply(dk_copies, dk_copies, over, rows_ * Kp);\n"),
    Fault(
        "cpu/recurrent/delta.h",
        "for (int i = 0; i < R; ++i) g[i] -= w * k[i];",
        "for (int i = 0; i < R; ++i) g[i] += w * k[i];",
    ),
    Fault("cpu/recurrent/delta.h", "keys > 4 ? 8 : 4;", "keys > 5 ? 8 : 4;"),
    without("cpu/recurrent/delta.h", "            scale(w.at(i), w.at(i), beta[i], Vp);\n"),
    without(
        "cpu/recurrent/sum_backward.h", "            back(K, vectors<real>(V), keys, values, d_state, Vs, all, dv);\n"
    ),
    Fault("cpu/recurrent/tiles.h", "            i = TILE / 2;", "            i = TILE / 4;"),
    Fault("cpu/recurrent/tiles.h", "passed[i] = j == 0 ? here : passed[i] + here;", "passed[i] = here;"),
    Fault(
        "cpu/recurrent/tiles.h",
        "for (int j = i; j < W; j += R) sum += parts[j];",
        "for (int j = i + R; j < W; j += R) sum += parts[j];",
    ),
    # Decays of large states
    Fault("cpu/chunked/levels.h", "d_log[t] += run += met[t];", "d_log[t] += met[t];"),
    Fault("cpu/chunked/levels.h", "(lane < index{} + end)", "(lane <= index{} + end)"),
    # What all share
    Fault(
        "cpu/chunked/scores.h",
        "lane_numbers<real>() + j > index{} + (t +",
        "lane_numbers<real>() + j >= index{} + (t +",
    ),
    Fault("cpu/gates.h", "d_log[i] -= keep[i] * dot", "d_log[i] += keep[i] * dot"),
    Fault("cpu/vector.h", "(bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16", "bits >> 16"),
    # A step
    Fault("cpu/recurrent/step.h", "-exponential_minus_one(log)", "exponential(log)"),
    Fault("cpu/recurrent/step.h", "* (z[j] * f) + u[j] * k", "* f + u[j] * k"),
    Fault(
        "cpu/recurrent/step.h",
        "(u[j] - (sums[0][j] + sums[1][j]) * z[j]) * rows.beta",
        "u[j] * rows.beta - (sums[0][j] + sums[1][j]) * z[j]",
    ),
    # The selective scan
    Fault("cpu/scan.h", "t > 0 ? load_rows(h_, kept(t)", "t > p_.interval ? load_rows(h_, kept(t)"),
    Fault("cpu/scan.h", "load(u_ + row + j * W) * from_B[j] + from_a[j]", "load(u_ + row + j * W) * from_B[j]"),
    Fault("cpu/scan.h", "sum_from<W, 1>(sums_C_ + n * W)", "sum_from<W, 1>(sums_B_ + n * W)"),
    Fault("cpu/scan.h", "y_[c] += sum<real>(y);", "y_[c] = sum<real>(y);"),
    without("cpu/scan.h", "        fill(dA_, real(0), N_ * ld_);\n"),
    without("cpu/scan.h", "                g *= load(kept_a + at_kept);\n"),
    # Heads that threads share
    without("cpu/binding.cpp", "            advance(*x, start);\n"),
    # Feature maps
    Fault("cpu/features.h", "block[i] = z[i] * z[i - j]", "block[i] = z[i] * z[i - j + 1]"),
    without(
        "cpu/features.h",
        "if (total < SMALLEST_NORMAL<real> && -total < SMALLEST_NORMAL<real>) return {whole, 1, false};",
    ),
    without("cpu/features.h", "for (index_t i = p_.dim; i < ld_; ++i) y[i] = 0;"),
    Fault("cpu/features.h", "-f.r * shared * f.inverse * f.inverse", "-f.r * shared * f.inverse"),
    without("cpu/features.h", "for (index_t i = -p_.nu; i < 0; ++i) dz[i + 2 * p_.dim] += dz[i];"),
    Fault("cpu/features.h", "at > 0 ? from : from * exponential(at)", "from * exponential(at)"),
    Fault("cpu/features.h", "x[i] = up - down, total += up + down", "x[i] = up - down, total += up - down"),
    # Gates, gated norms and short convolutions
    Fault("cpu/elementary.h", "sigma.value * (u * sigma.rest + 1)", "sigma.value * (u + 1)"),
    Fault("cpu/gating.h", "load(z + i) * shared - mean) * inverse", "load(z + i) * shared) * inverse"),
    without("cpu/gating.h", "        for (index_t i = count * p_.channels(); i < ld_; ++i) row[i] = 0;\n"),
    Fault("cpu/convolution.h", "while (j < R_ && (j > t", "while (j < R_ && (j >= t"),
    Fault("cpu/convolution.h", "(x_ + (R_ + r - j) * ld_ + i)", "(x_ + (R_ + r) * ld_ + i)"),
    # Steps of layers
    without("cpu/steps/window.h", "        largest -= log_factor;\n"),
    Fault("cpu/steps/window.h", "recall(b, h, seen >= p_.window)", "recall(b, h, seen > p_.window)"),
    without("cpu/steps/delta.h", "        copy(rows_.erase, rows_.k, padded(p_.features));\n"),
    Fault("cpu/steps/features.h", "return;\n        scale(y, y, 1 / total", "return;\n        scale(y, y, 2 / total"),
    Fault("cpu/steps/gated_delta.h", "h * p_.k_heads / p_.heads", "h % p_.k_heads"),
    without("cpu/steps/gated_delta.h", "        for (index_t i = n; i < padded(n); ++i) row[i] = 0;\n"),
)

CUDA = (
    # Feature maps
    Fault("cuda/features.cu", "other = at - block - 1", "other = at - block"),
    Fault("cuda/features.cu", "other < 0 ? other + size : other", "other < 0 ? 0 : other"),
    Fault(
        "cuda/features.cu", "other > 0; other /= 2) {\n            total", "other > 1; other /= 2) {\n            total"
    ),
    Fault("cuda/features.cu", "d = x > A(0) ? d : d * exponential(x)", "d = d * exponential(x)"),
    Fault("cuda/features.cu", "r * shared * inverse * inverse", "r * shared * inverse"),
    Fault("cuda/features.cu", "at + j < size ? at + j : at + j - size", "at + j < size ? at + j : at + j - size + 1"),
    # Gates, gated norms and short convolutions
    Fault("cuda/elementary.cuh", "sigma * (u * rest + A(1))", "sigma * (u + A(1))"),
    Fault("cuda/gating.cu", "z(i) * with_z - total) * inverse", "z(i) * with_z) * inverse"),
    Fault("cuda/gating.cu", "i < kThreads; i += across) total", "i < kThreads / 2; i += across) total"),
    Fault("cuda/convolution.cu", "while (j < R && (j > t", "while (j < R && (j >= t"),
    Fault("cuda/convolution.cu", "j = s < 0 ? int(-s) : 0", "j = s < 0 ? int(1 - s) : 0"),
    # Recurrent kernels
    Fault("cuda/recurrent/forward.cuh", "if constexpr (M == kScalar) old *= x.gate;", ""),
    Fault(
        "cuda/recurrent/forward.cuh",
        "x.v[c] = x.write * (x.v[c] - retrieved[c]);",
        "x.v[c] = x.write * x.v[c] - retrieved[c];",
    ),
    Fault("cuda/recurrent/forward.cuh", "if constexpr (M == kBoth) old *= x.z[c];", ""),
    Fault("cuda/recurrent/forward.cuh", "copies_wait<0>();\n        __syncthreads();", "copies_wait<0>();"),
    Fault(
        "cuda/recurrent/forward.cuh",
        "        if (segment == segments.count - 1)\n            slice.store(state, static_cast<A*>(call.final_state)",
        "        if (segment == 0)\n            slice.store(state, static_cast<A*>(call.final_state)",
    ),
    Fault(
        "cuda/recurrent/backward.cuh",
        "if (p % plan.spacing == 0) put_slot<Tile>(state, memory + at.outer,",
        "if (p == 0) put_slot<Tile>(state, memory + at.outer,",
    ),
    Fault("cuda/recurrent/backward.cuh", "dk[r] -= state[r][c] * dv[c];", "dk[r] += state[r][c] * dv[c];"),
    Fault("cuda/recurrent/backward.cuh", "grad[r][c] -= erase[r] * dv[c];", ""),
    Fault("cuda/recurrent/backward.cuh", "if (plan.first_split > 0) sum += load", "if (false) sum += load"),
    Fault(
        "cuda/recurrent/backward.cuh",
        "x.f[r];\n                        }\n                    if (apart)",
        "A(1);\n                        }\n                    if (apart)",
    ),
    Fault(
        "cuda/recurrent/backward.cuh",
        "for (int split = 0; split < splits; ++split) sum +=",
        "for (int split = 1; split < splits; ++split) sum +=",
    ),
    # Gates of a chunk
    Fault("cuda/chunked/gates.cuh", "4 + (block ^ last) / 2", "4"),
    Fault("cuda/chunked/gates.cuh", "x *= to_middle.x", "x *= own ? 1.0f : to_middle.x"),
    # The delta rule: the local stage
    Fault("cuda/chunked/local.cu", "- beta[first + j] * x[j];", "- x[j];"),
    Fault("cuda/chunked/gates.cuh", "if (own) part.each", "if (false) part.each"),
    Fault("cuda/chunked/gates.cuh", "x = s <= t ? x", "x = s < t ? x"),
    Fault("cuda/chunked/local.cu", "- beta[row + t] * x;", "- x;"),
    Fault("cuda/chunked/local.cu", "if (inner >= first)", "if (inner > first)"),
    Fault("cuda/chunked/local.cu", "products.from(row, row)", "products.from(first, first)"),
    Fault("cuda/chunked/gates.cuh", "= own.beta * from_chunk;", "= own.beta;"),
    without(
        "cuda/chunked/local.cu",
        "        if constexpr (!Decays)\n            UNROLL_FOR (Pairs& of : pairs) steps.keep_pairs(of, row);\n",
    ),
    Fault("cuda/chunked/local.cu", "    __syncthreads();\n    // Substitution", "    // Substitution"),
    Fault("cuda/chunked/local.cu", "at.copy(to, x, key, given", "at.copy(to, x, 0, given"),
    Fault(
        "cuda/chunked/local.cu",
        "(t - below - row) * kBlockSide + j - group",
        "(j - group) * kBlockSide + t - below - row",
    ),
    Fault("cuda/chunked/local.cu", "t == first + j ? 0.0f : as_right_factor", "as_right_factor"),
    Fault("cuda/chunked/slices.h", "(down / kBlockSide + 1) / 2", "(down / kBlockSide) / 2"),
    Fault("cuda/chunked/slices.h", "column % 2 * 4 + column % 8 / 2;", "column % 8;"),
    Fault("cuda/chunked/local.cu", "given.erase.data ? given.erase : given.k", "given.k"),
    Fault(
        "cuda/chunked/gates.cuh",
        "            numbers[kBeta + step] = own.beta;",
        "            numbers[kBeta + step] = 1.0f;",
    ),
    Fault("cuda/chunked/gates.cuh", "(level & (parts - 1)) == part", "(level & (parts - 1)) == 0"),
    Fault(
        "cuda/chunked/outputs.cu",
        "                if (key > 0 || value > 0) copy_values",
        "                if (key > 0) copy_values",
    ),
    Fault("cuda/chunked/gradients.cu", "if (key > 0 || value > 0) copy_states", "if (key > 0) copy_states"),
    # The walk
    Fault("cuda/chunked/strips.cuh", "[i / 2][i % 2 * 2 + 1] = widen", "[i / 2][3 - i % 2 * 2] = widen"),
    Fault(
        "cuda/chunked/walk_parts.cuh",
        "to.data + (first + 8 * n) * to.stride + first_of_four()",
        "to.data + (first + 8 * n) * to.stride",
    ),
    Fault("cuda/chunked/walk_parts.cuh", "if (first + 8 * n < end)", "if (true)"),
    Fault("cuda/chunked/walk_parts.cuh", "first + 8 * n + i % 2 < end && group", "group"),
    Fault("cuda/chunked/walk_parts.cuh", "< end && group + i / 2 * 8 < rows.dim)", "< end)"),
    Fault("cuda/chunked/walk_parts.cuh", "own < from.dim ? end - start - row : 0", "end - start - row"),
    Fault("cuda/chunked/walk_parts.cuh", "All || down < rows_there);", "true);"),
    Fault("cuda/chunked/walk_parts.cuh", "rows_on = warps * kDown;", "rows_on = kDown;"),
    Fault("cuda/chunked/walk_parts.cuh", "if (kWhole || row + down < Rows)", "if (true)"),
    Fault("cuda/chunked/walk_parts.cuh", "(to.from(0, first), Head", "(to, Head"),
    Fault("cuda/chunked/walk_parts.cuh", "Head<T>(from.data + first,", "Head<T>(from.data,"),
    without("cuda/chunked/walk_parts.cuh", "    if (Warps > 0) warps = Warps;\n"),
    Fault("cuda/chunked/walk_parts.cuh", "    found = left;\n", "    found.clear();\n"),
    Fault("cuda/chunked/tensor_core.cuh", "4>({x[0], x[2], x[1], x[3]})", "4>({x[0], x[1], x[2], x[3]})"),
    Fault("cuda/chunked/walk_parts.cuh", "if (RowsInner || n > e) second", "if (n > e) second"),
    Fault("cuda/chunked/walk_parts.cuh", "n < (RowsInner ? e + 2 : kSide / 8)", "n < (RowsInner ? e + 1 : kSide / 8)"),
    Fault("cuda/chunked/strips.cuh", "(value[first / kTogether])", "(value[0])"),
    Fault("cuda/chunked/strips.cuh", "load_matrices<RowsInner>(b,", "load_matrices<!RowsInner>(b,"),
    Fault("cuda/chunked/walk_parts.cuh", "    __syncthreads();\n    x.clear();", "    x.clear();"),
    Fault("cuda/chunked/walk_parts.cuh", "for (int p = 0; p < parts; ++p)", "for (int p = 1; p < parts; ++p)"),
    Fault("cuda/chunked/walk.cu", "max(1, (begin + interval - 1) / interval) * interval;", "interval;"),
    without("cuda/chunked/walk.cu", "            next_kept += interval;\n"),
    Fault("cuda/chunked/walk.cu", "? w.first : w.others;", "? w.first : w.first;"),
    Fault("cuda/chunked/walk.cu", "int i = -ahead;", "int i = 0;"),
    Fault("cuda/chunked/strips.cuh", "odd ? one : two, 1", "odd ? two : one, 1"),
    Fault("cuda/chunked/walk.cu", "copies_wait<kMostStages - 2>();", "copies_wait<kMostStages - 1>();"),
    Fault("cuda/chunked/walk.cu", "fetch(nth(i + ahead),", "fetch(nth(i + 1),"),
    Fault("cuda/chunked/walk.cu", "if (copier) warp -= warps;", ""),
    Fault("cuda/chunked/walk.cu", "        }\n        __syncthreads();\n    };", "        }\n    };"),
    Fault("cuda/chunked/walk.cu", "read.scale(steps + kReadBeta);", "read.scale(steps + kBeta);"),
    Fault("cuda/chunked/walk.cu", "            found.scale(steps + kToEnd);\n", ""),
    Fault("cuda/chunked/walk.cu", "if (gated) read.scale(steps + kToEnd);", ""),
    without("cuda/chunked/walk.cu", "scaled.scale(by);"),
    Fault("cuda/chunked/walk.cu", "add_given(steps + kFromStart, q);", "add_given(steps + kToEnd, q);"),
    without("cuda/chunked/walk.cu", "            found.scale(-1.0f);\n"),
    without("cuda/chunked/walk.cu", "if (gated) state.scale(steps[kWholeGate]);"),
    Fault(
        "cuda/chunked/walk.cu",
        "const int number = blockIdx.y + (reverse && w.probe ? 1 : 0);",
        "const int number = blockIdx.y;",
    ),
    Fault("cuda/chunked/walk.cu", "first_key + place == column + j ? 1.0f", "place == column + j ? 1.0f"),
    # Products of warpgroups
    without("cuda/chunked/rows.cuh", "    if (in_groups()) show_to_groups();\n"),
    Fault("cuda/chunked/rows.cuh", "return finish(true, sums);", "return;"),
    Fault(
        "cuda/chunked/rows.cuh", "left.template descriptor<Turned>(16 * e, 0)", "left.template descriptor<Turned>(0, 0)"
    ),
    Fault(
        "cuda/chunked/rows.cuh",
        "left.template descriptor<Turned>(16 * e, 0)",
        "left.template descriptor<!Turned>(16 * e, 0)",
    ),
    without("cuda/chunked/strips.cuh", "        if (e >= inner) break;\n"),
    Fault("cuda/chunked/strips.cuh", "descriptor<RowsInner>(16 * e, 8 * n)", "descriptor<RowsInner>(0, 8 * n)"),
    Fault("cuda/chunked/strips.cuh", "odd ? one : two, 1)", "odd ? two : one, 1)"),
    Fault("cuda/chunked/strips.cuh", "odd ? other : one, odd ? two : other", "one, two"),
    Fault("cuda/chunked/tensor_core.cuh", "a, Turned, b, RowsInner", "a, !Turned, b, RowsInner"),
    Fault("cuda/chunked/walk_parts.cuh", "nth % 2 * 4 + nth / 2 : nth", "nth % 2 * 4 + nth / 4 : nth"),
    Fault("cuda/chunked/levels_gradient.cuh", "rows(first + row_of(place), column)", "rows(first + place, column)"),
    Fault("cuda/chunked/levels_gradient.cuh", "place % 8 / 2 + place % 2 * 4", "place % 8 / 2 + place % 2"),
    without("cuda/chunked/walk.cu", "            if (grouped) show_to_groups();\n"),
    without("cuda/chunked/walk.cu", "        finish(grouped, read);\n"),
    Fault(
        "cuda/chunked/walk.cu",
        "multiply<kPasses, true>(grouped, state, found, write_keys);",
        "start<kPasses, true>(grouped, state, found, write_keys);",
    ),
    Fault(
        "cuda/chunked/walk.cu",
        "multiply<kPasses, true>(grouped, state, given, right);",
        "start<kPasses, true>(grouped, state, given, right);",
    ),
    Fault("cuda/chunked/walk.cu", "return all.from(0, stage * Keys * parts);", "return all;"),
    without("cuda/chunked/strips.cuh", "emulation::wgmma_fence()"),
    without("cuda/chunked/strips.cuh", "emulation::wgmma_commit()"),
    without("cuda/chunked/strips.cuh", "emulation::wgmma_wait(0)"),
    Fault("cuda/chunked/strips.cuh", "part < parts; ++part", "part < 1; ++part"),
    Fault("cuda/chunked/strips.cuh", "if constexpr (Split) mma_stored", "if constexpr (false) mma_stored"),
    Fault("cuda/chunked/strips.cuh", "n < N; n += kGroupColumns / 8", "n < 8; n += kGroupColumns / 8"),
    Fault("cuda/chunked/block.cuh", "8 * (rows + 1)}", "8 * (rows - 1)}"),
    Fault("cuda/chunked/block.cuh", "? eight_rows : eight_columns) << 16", "? eight_columns : eight_rows) << 16"),
    Fault("cuda/chunked/block.cuh", "? inner + column / 8 * eight_columns", "? inner"),
    Fault("cuda/chunked/block.cuh", ": column + inner / 8 * eight_columns", ": column"),
    Fault("cuda/chunked/tensor_core.cuh", "a, b, RowsInner,", "a, b, !RowsInner,"),
    # Slices, segments of them, and the stages after the walk
    Fault(
        "cuda/chunked/stages.cuh",
        "plan.pass.backward ? slices - 1 - i % slices : i % slices",
        "i % slices",
    ),
    Fault("cuda/chunked/stages.cuh", "        w.first = w.others = all;\n", ""),
    Fault("cuda/chunked/rows.cuh", "batch((slice.first_head + local) / sizes.heads)", "batch(local / sizes.heads)"),
    Fault("cuda/chunked/outputs.cu", "slice.begin > 0 ? last : nth_state", "false ? last : nth_state"),
    Fault("cuda/chunked/outputs.cu", "x *= steps.from_start(row + j); });", "});"),
    without("cuda/chunked/outputs.cu", "        steps.keep_pairs(scores, row);\n"),
    Fault(
        "cuda/chunked/gradients.cu",
        "slice.begin / interval - 1), kept, 1};",
        "slice.begin / interval), kept, 1};",
    ),
    Fault("cuda/chunked/gradients.cu", "{slice.begin > 0 ? between : nth_state", "{false ? between : nth_state"),
    Fault("cuda/chunked/gradients.cu", "d_beta[half] += shared.d_right", "d_beta[half] -= shared.d_right"),
    Fault("cuda/chunked/gradients.cu", "{ d_beta[j >= 8] += x; }", "{ d_beta[j >= 8] -= x; }"),
    Fault("cuda/chunked/gradients.cu", "x *= -steps.from_start(row + j); });", "x *= -1.0f; });"),
    without(
        "cuda/chunked/gradients.cu", "multiply_rows<kPasses, true, true>(dk, shared.pairs, row, shared.k, kSide / 16);"
    ),
    Fault("cuda/chunked/gradients.cu", "sums.put_passing(passed);", "sums.put_passing(0.0f);"),
    Fault("cuda/chunked/gradients.cu", "sums.written()[row + j] = sum *", "sums.read()[row + j] += sum *"),
    without("cuda/chunked/gradients.cu", "if (!all_values) copy_values(value);"),
    without("cuda/chunked/gradients.cu", "if (value == 0 && !all_keys && (key > 0 || !kDecays)) copy_keys(key);"),
    # The same where nothing corrects
    Fault("cuda/chunked/walk.cu", "Corrects ? Backward : w.pass.backward;", "Backward;"),
    Fault(
        "cuda/chunked/walk.cu",
        "add_given(steps + (reverse ? kFromStart : kToEnd), k);",
        "add_given(steps + kToEnd, k);",
    ),
    without("cuda/chunked/walk.cu", "                passed_log += steps[kWholeLog];\n"),
    without("cuda/chunked/walk.cu", "                state.scale(steps[kWholeGate]);\n"),
    Fault("cuda/chunked/walk.cu", "multiply<kPasses, true, true>(grouped", "multiply<kPasses, true>(grouped"),
    Fault("cuda/chunked/gates.cuh", "= to_chunk * write;", "= to_chunk;"),
    Fault("cuda/chunked/local.cu", "!Corrects && given.complement", "false"),
    without("cuda/chunked/outputs.cu", "if constexpr (Gated && !Corrects) scores.scale(steps.strengths());"),
    without("cuda/chunked/gradients.cu", "        if constexpr (Gated) scores.scale(steps.strengths());\n"),
    Fault("cuda/chunked/gradients.cu", "sum * steps.strength(row + j)", "sum"),
    Fault("cuda/chunked/gradients.cu", "if (complement && Gated) d_scores.scale", "if (false) d_scores.scale"),
    Fault("cuda/chunked/gradients.cu", "sums.strength()[row + j] = sum;", "sums.strength()[row + j] = 0.0f;"),
    without("cuda/chunked/gradients.cu", "dk.each([&](int, int j, float& x) { x *= steps.strength(row + j); });"),
    Fault(
        "cuda/chunked/gradients.cu",
        "x *= steps.to_end(row + j) * steps.strength(row + j);",
        "x *= steps.to_end(row + j);",
    ),
    Fault("cuda/chunked/gradients.cu", "(part, pairs, row,", "(part, pairs, 0,"),
    Fault("cuda/chunked/gradients.cu", "if (kDecays || !all_keys || !all_values) {", "if (kDecays || !all_values) {"),
    Fault("cuda/chunked/gradients.cu", "if (!all_values && key == 0)", "if (false)"),
    Fault("cuda/chunked/stages.cuh", ": pass.gated;", ": 0;"),
    # Rows in shared memory: copies
    Fault("cuda/chunked/rows.cuh", "column < columns_there ? rows_there - first : 0", "rows_there - first"),
    Fault("cuda/chunked/rows.cuh", "piece += kDown * stride)", "piece += kDown)"),
    Fault("cuda/chunked/rows.cuh", "if ((rows == kSide && kDown <= kSide) || first + row < rows)", "if (true)"),
    Fault("cuda/chunked/rows.cuh", "kSide, sizes.time - start, from.dim);", "kSide, kSide, from.dim);"),
    Fault("cuda/chunked/rows.cuh", "kSide, sizes.time - start, from.dim);", "kSide, sizes.time - start, Columns);"),
    Fault("cuda/chunked/rows.cuh", "if (!from.in_pieces(Columns)) return", "if (false) return"),
    Fault("cuda/chunked/gradients.cu", "own < kKeys; own += kWarp", "own < kWarp; own += kWarp"),
    Fault("cuda/chunked/gradients.cu", "j < 16 * blocks; j += kBlocks", "j < 16; j += kBlocks"),
    Fault("cuda/chunked/rows.cuh", "slice.rows_of(all, local, n) + value * kSide", "slice.rows_of(all, local, n)"),
    Fault("cuda/chunked/rows.cuh", "copy(to, v, value, sizes", "copy(to, v, 0, sizes"),
    Fault("cuda/chunked/rows.cuh", "+ down * width + across", "+ down * width"),
    Fault("cuda/chunked/rows.cuh", "width - across);", "width);"),
    Fault("cuda/chunked/rows.cuh", "down * width + across", "across"),
    Fault("cuda/chunked/gates.cuh", "Gated ? kGateNumbers : kSide)", "kSide)"),
    Fault("cuda/chunked/gates.cuh", "i < step_numbers(Gated); i +=", "i < kWalkNumbers; i +="),
    # Their products
    Fault("cuda/chunked/rows.cuh", "&own(third + low, second)", "&own(second + low, third)"),
    Fault("cuda/chunked/rows.cuh", ": &own(second + low, third)", ": &own(third + low, second)"),
    Fault("cuda/chunked/rows.cuh", "load_matrices<Turned>(part", "load_matrices<!Turned>(part"),
    without("cuda/chunked/rows.cuh", "        if (e >= blocks) break;\n"),
    Fault("cuda/chunked/rows.cuh", "Turned ? left.from(16 * e, row)", "Turned ? left.from(0, row)"),
    Fault("cuda/chunked/rows.cuh", "x = Turned ? own(place, j)", "x = Turned ? own(j, place)"),
    Fault("cuda/chunked/rows.cuh", "for (int e = 0; e < kSide / 16; ++e)", "for (int e = 0; e < 1; ++e)"),
    Fault(
        "cuda/chunked/rows.cuh",
        "right.from(16 * e, 0) : right.from(0, 16 * e)",
        "right.from(16 * e, 0) : right.from(0, 0)",
    ),
    Fault("cuda/chunked/gradients.cu", "inner < 16 * blocks; inner += 4", "inner < 16; inner += 4"),
    Fault("cuda/chunked/rows.cuh", "n < N / 2 - 1; ++n)", "n < N / 2 - 2; ++n)"),
    Fault("cuda/chunked/rows.cuh", "part<2>(2 * n), 16 * n);", "part<2>(2 * n), 0);"),
    Fault(
        "cuda/chunked/outputs.cu",
        "Corrects ? shared.update.from(first, 0) : shared.update.from(0, first)",
        "Corrects ? shared.update.from(first, 0) : shared.update",
    ),
    Fault("cuda/chunked/gradients.cu", "shared.d_state.from(first, 0)", "shared.d_state"),
    Fault("cuda/chunked/gradients.cu", "shared.d_out.from(0, first)", "shared.d_out"),
    # What is stored of them
    Fault("cuda/chunked/strips.cuh", "if (8 * n < left)", "if (left > 0)"),
    Fault("cuda/chunked/strips.cuh", "% 2 * 8 + warp_lane() % 4 / 2 * 4;", "% 2 * 8;"),
    Fault("cuda/chunked/strips.cuh", "group + 8 * half < rows ? places - first : 0;", "places - first;"),
    Fault("cuda/chunked/strips.cuh", "sizeof(F)) % 8 == 0 &&", "sizeof(F)) % 2 == 0 &&"),
    Fault("cuda/chunked/strips.cuh", "== 0 && min(places, to.dim) % 4 == 0)", "== 0)"),
    Fault("cuda/chunked/strips.cuh", "if (place < min(places, to.dim) && start + j < time)", "if (start + j < time)"),
    Fault(
        "cuda/chunked/strips.cuh",
        "if (place < min(places, to.dim) && start + j < time)",
        "if (place < min(places, to.dim))",
    ),
    Fault("cuda/chunked/strips.cuh", "min(places, to.dim), time - start);", "min(places, to.dim));"),
    Fault("cuda/chunked/strips.cuh", "odd ? other : one, odd ? two : other", "one, odd ? two : other"),
    Fault("cuda/chunked/strips.cuh", "&by(j, place)", "&by(j % 8, place)"),
    Fault("cuda/chunked/strips.cuh", "if (place < places && j < rows) put_pair", "if (place < places) put_pair"),
    Fault("cuda/chunked/strips.cuh", "if (place < places && j < rows) put_pair", "if (j < rows) put_pair"),
    # Barriers and waits of the stages that take all chunks at once
    Fault("cuda/chunked/outputs.cu", "each_part<1>(", "each_part<2>("),
    Fault(
        "cuda/chunked/rows.cuh", "            __syncthreads();\n            copy(first);", "            copy(first);"
    ),
    Fault("cuda/chunked/rows.cuh", "            arrive();\n        } else", "        } else"),
    Fault("cuda/chunked/rows.cuh", "arrive<Behind>();\n", "copies_wait<Behind>();\n"),
    Fault(
        "cuda/chunked/outputs.cu",
        "                __syncthreads();\n                if (!there)",
        "                if (!there)",
    ),
    Fault("cuda/chunked/rows.cuh", "show_to_groups();\n    __syncthreads();", "show_to_groups();"),
    Fault("cuda/chunked/outputs.cu", "if (value > 0 || !there) {", "if (value > 0) {"),
    Fault("cuda/chunked/gradients.cu", "each_part<2>(", "each_part<3>("),
    Fault("cuda/chunked/gradients.cu", "each_part<1>(", "each_part<2>("),
    without("cuda/chunked/gradients.cu", "    __syncthreads();  // nobody reads v any more\n"),
    Fault(
        "cuda/chunked/gradients.cu",
        "                __syncthreads();\n                if (value == 0",
        "                if (value == 0",
    ),
    Fault(
        "cuda/chunked/gradients.cu",
        "                    __syncthreads();\n                    if (kDecays || !all_keys) at.copy",
        "                    if (kDecays || !all_keys) at.copy",
    ),
    Fault(
        "cuda/chunked/gradients.cu", "sums.put_passing(passed);\n        __syncthreads();", "sums.put_passing(passed);"
    ),
    without("cuda/chunked/local.cu", "            if (key > 0) __syncthreads();\n"),
    Fault("cuda/chunked/local.cu", "                arrive();\n", "                copies_wait<0>();\n"),
    Fault("cuda/chunked/local.cu", "beta) {\n    __syncwarp();\n", "beta) {\n"),
    Fault("cuda/chunked/gates.cuh", "= other;\n                    __syncthreads();", "= other;"),
    Fault(
        "cuda/chunked/gates.cuh",
        "            }\n        }\n        __syncthreads();\n    }",
        "            }\n        }\n    }",
    ),
    # Gates within a chunk, and their gradients
    Fault("cuda/chunked/gates.cuh", "before = own.log_gate, after = 0.0f;", "before = 0.0f, after = own.log_gate;"),
    Fault("cuda/chunked/gates.cuh", "half % kWarp)", "half / 2)"),
    Fault("cuda/chunked/gates.cuh", "expf(late ? before : after)", "expf(late ? after : before)"),
    Fault("cuda/chunked/gates.cuh", "(late ? before : after) += other;", "before += other;"),
    Fault("cuda/chunked/gates.cuh", "(late ? before : after) += other;", "(late ? after : before) += other;"),
    Fault("cuda/chunked/gates.cuh", "-expm1f(own.log_gate)", "1.0f - expf(own.log_gate)"),
    Fault("cuda/chunked/gates.cuh", "halves[1 - step / kWarp]", "halves[step / kWarp]"),
    Fault("cuda/chunked/gates.cuh", "own && s + 1 == t ? 1.0f : to_middle.y", "to_middle.y"),
    Fault("cuda/chunked/gates.cuh", "numbers[kWholeLog] = before;", "numbers[kWholeLog] = 0.0f;"),
    Fault("cuda/chunked/gates.cuh", "kOfLevels + 3 * kSide", "kOfLevels + 2 * kSide"),
    Fault("cuda/chunked/gates.cuh", "if (block > last) {", "if (false) {"),
    Fault("cuda/chunked/gates.cuh", "warp_lane() / 8 ^ warp_lane() % 4, 2)", "warp_lane() / 8 ^ warp_lane() % 4, 1)"),
    Fault("cuda/chunked/gates.cuh", "x = s <= row + j ? x", "x = s < row + j ? x"),
    Fault("cuda/chunked/gates.cuh", "x *= to_middle.x * left[row + t];", "x *= to_middle.x;"),
    Fault("cuda/chunked/gates.cuh", "left + block * kBlockSide + s)", "left + s)"),
    Fault("cuda/chunked/gates.cuh", "if (u <= t) sums[0]", "if (u < t) sums[0]"),
    Fault("cuda/chunked/gates.cuh", "if (u < t) sums[1] += sum + x;", "if (u < t) sums[1] += sum;"),
    Fault("cuda/chunked/gates.cuh", "((member & 2) ? others : 0.0f)", "0.0f"),
    Fault("cuda/chunked/gates.cuh", "before[half] += two + others;", "before[half] += two;"),
    Fault("cuda/chunked/gates.cuh", "if (8 * n < row + kTileRows)", "if (8 * n < row)"),
    Fault("cuda/chunked/gates.cuh", "distance < kWarp; distance *= 2)", "distance < kWarp / 2; distance *= 2)"),
    Fault("cuda/chunked/gates.cuh", "(step >= u ? read() : written())", "(step > u ? read() : written())"),
    Fault(
        "cuda/chunked/gates.cuh",
        "(int warp = 0; warp < kBlocks; ++warp)",
        "(int warp = 0; warp < kBlocks - 1; ++warp)",
    ),
    Fault("cuda/chunked/gates.cuh", "return sum + passed * whole;", "return sum + passed;"),
    Fault("cuda/chunked/gates.cuh", "distance > 0; distance /= 2)", "distance > 1; distance /= 2)"),
    Fault("cuda/chunked/gates.cuh", "(kBlocks + 3) * kSide + kBlocks", "(kBlocks + 3) * kSide"),
    Fault("cuda/chunked/local.cu", "!Corrects && given.complement", "true"),
    # The system of a chunk
    Fault("cuda/chunked/local.cu", "products.from(first, first)", "products.from(0, 0)"),
    Fault("cuda/chunked/local.cu", "block(i + half, column) =", "block(column, i + half) ="),
    Fault("cuda/chunked/local.cu", "Decays ? find_steps() : __syncthreads();", "if (Decays) find_steps();"),
    Fault("cuda/chunked/local.cu", "carver.used > square.used ? carver.used : square.used", "carver.used"),
    Fault("cuda/chunked/local.cu", "__syncwarp();\n    UNROLL_FOR (int i = 0;", "UNROLL_FOR (int i = 0;"),
    Fault("cuda/chunked/local.cu", "half == 0 ? x[i] : x[i + 8]", "x[i]"),
    Fault("cuda/chunked/local.cu", "sizeof(T) == 4 ? x : __uint_as_float(to_tf32(x))", "x"),
    Fault("cuda/chunked/local.cu", "if (row < first) continue;", "if (row <= first) continue;"),
    Fault("cuda/chunked/local.cu", "products.from(row, inner)", "products.from(row, 0)"),
    Fault("cuda/chunked/local.cu", "row + t == first + j ? 1.0f", "t == j ? 1.0f"),
    without("cuda/chunked/local.cu", "        if (row < first) return;\n"),
    Fault("cuda/chunked/local.cu", "&to(below, 0) + first * kBlockSide", "&to(below, 0)"),
    without("cuda/chunked/local.cu", "pairs[0].each([](int, int, float& x) { x = as_right_factor<T>(x); });"),
    Fault("cuda/chunked/local.cu", "first < row + !Decays", "first < row"),
    Fault("cuda/chunked/local.cu", "&to(row, first), &to", "&to(row, 0), &to"),
    Fault("cuda/chunked/local.cu", "copy(shared.readers[0], given.q);", "copy(shared.readers[0], given.k);"),
    # Gradients
    without("cuda/chunked/gradients.cu", "        if constexpr (Corrects) steps.keep_pairs(d_system, row);\n"),
    Fault("cuda/chunked/gradients.cu", "s < row + j ? -x : 0.0f", "s < row + j ? x : 0.0f"),
    without("cuda/chunked/gradients.cu", "            by_beta(products);\n"),
    without("cuda/chunked/gradients.cu", "            inside.scale(steps.strengths());\n"),
    without("cuda/chunked/gradients.cu", "            by_beta(scores);\n"),
    Fault("cuda/chunked/gradients.cu", "by_beta(read);\n                read.dot(read_sums", "read.dot(read_sums"),
    Fault("cuda/chunked/gradients.cu", "by_beta(read);\n            }", "}"),
    without("cuda/chunked/gradients.cu", "dk.each([&](int, int j, float& x) { x *= steps.to_end(row + j); });"),
    Fault("cuda/chunked/gradients.cu", "if (complement && kRounded<T>)", "if (false)"),
    without("cuda/chunked/gradients.cu", "            dq.dot(read_sums, own_q);\n"),
    Fault(
        "cuda/chunked/gradients.cu",
        "read.dot(d_beta, own_k);\n                by_beta(read);\n                read.dot",
        "by_beta(read);\n                read.dot",
    ),
    Fault(
        "cuda/chunked/gradients.cu",
        "read.dot(d_beta, own_k);\n                by_beta(read);\n            }",
        "by_beta(read);\n            }",
    ),
    without("cuda/chunked/gradients.cu", "multiply<kPasses, true>(in_groups(), read, scores, shared.k);\n"),
    without("cuda/chunked/rows.cuh", "        sum += __shfl_xor_sync(kAllLanes, sum, 2);\n"),
    Fault("cuda/chunked/rows.cuh", "done(warp_lane() / 4 + 8 * half, sum)", "done(warp_lane() / 4, sum)"),
    Fault("cuda/chunked/gradients.cu", "d_beta[half] += shared", "d_beta[0] += shared"),
    Fault("cuda/chunked/gradients.cu", "if (start + row + j < time) store_step", "store_step"),
    Fault("cuda/chunked/gradients.cu", "thread >= kSide || start + thread >= time", "thread >= kSide"),
    Fault("cuda/chunked/gradients.cu", "at.head, start + thread, time) : 0.0f;", "at.head, start, time) : 0.0f;"),
    Fault("cuda/chunked/gradients.cu", "sum -= sums.strength()", "sum += sums.strength()"),
    without("cuda/chunked/gradients.cu", "if constexpr (Corrects) at.copy(shared.v, p.v, value, values_in_all);"),
    without("cuda/chunked/gradients.cu", "if (kDecays || !all_keys) at.copy(shared.k, written, key, keys_in_all);"),
    without("cuda/chunked/gradients.cu", "            steps.keep_pairs(scores, row);\n"),
    Fault(
        "cuda/chunked/gradients.cu",
        "kKeys, start + row, time);\n        if constexpr (Corrects) {",
        "kKeys, start, time);\n        if constexpr (Corrects) {",
    ),
    # Decays of keys
    Fault("cuda/chunked/slices.h", "(first_head * head + begin * chunk)", "(first_head * head)"),
    Fault("cuda/chunked/local.cu", "earlier * kSteps >= row", "earlier * kSteps > row"),
    without("cuda/chunked/local.cu", "            left.scale(&totals(earlier, key));\n"),
    Fault("cuda/chunked/local.cu", "between(shared.totals, lane, block, kBlocks)", "1.0f"),
    Fault("cuda/chunked/local.cu", "between(shared.totals, lane, block, 0)", "1.0f"),
    without("cuda/chunked/local.cu", "    scale_to_end(scale, gates, 1.0f);\n"),
    Fault("cuda/chunked/local.cu", "Corrects && Backward ? slice.queries : nullptr", "nullptr"),
    Fault("cuda/chunked/local.cu", "is_late<level>(block, t) || i == 0", "i == 0"),
    Fault("cuda/chunked/local.cu", "Level < 0 ? t == s + i :", "Level < 0 ? false :"),
    Fault("cuda/chunked/local.cu", "if (Level == kLevelsOfBlock - 1) pairs", "if (false) pairs"),
    Fault("cuda/chunked/local.cu", "own ? row : block", "own ? 0 : block"),
    Fault("cuda/chunked/local.cu", "log += shared.logs(of, lane);", ";"),
    Fault("cuda/chunked/local.cu", "= shared.totals(block, lane);", "= 1.0f;"),
    Fault("cuda/chunked/local.cu", "decays[slice.key_rows] = log;", "decays[slice.key_rows] = 0.0f;"),
    without(
        "cuda/chunked/walk.cu",
        "            if constexpr (Decays) state.scale(&decays(0, 0));\n",
    ),
    Fault("cuda/chunked/walk.cu", "read_keys = Backward ? k : erase, &", "read_keys = k, &"),
    Fault("cuda/chunked/walk.cu", "write_keys = Backward ? erase : k;", "write_keys = k;"),
    Fault("cuda/chunked/walk_parts.cuh", "Reverse ? kBlocks - 1 - i : i;", "i;"),
    without("cuda/chunked/walk_parts.cuh", "            left.scale(&decays(block, 8 * e));\n"),
    without("cuda/chunked/walk.cu", "                state.scale(&decays(block, 0));\n"),
    Fault("cuda/chunked/levels_gradient.cuh", "to > block ? to_later : 0.0f;", "0.0f;"),
    Fault("cuda/chunked/levels_gradient.cuh", "to == (block ^ 1) ? to_half : 0.0f", "0.0f"),
    Fault("cuda/chunked/levels_gradient.cuh", " && block % (kBlocks - 1) == 0)", ")"),
    Fault("cuda/chunked/levels_gradient.cuh", "to_earlier += add_half", "to_earlier = add_half"),
    Fault("cuda/chunked/levels_gradient.cuh", "whole *= between(shared.totals, column, block, 0) *", "whole *="),
    Fault("cuda/chunked/levels_gradient.cuh", "Level == kLevelsOfBlock ? shared.rows : shared.others", "shared.rows"),
    Fault("cuda/chunked/levels_gradient.cuh", "__syncthreads();\n#pragma unroll 1", "#pragma unroll 1"),
    Fault("cuda/chunked/levels_gradient.cuh", "}\n        __syncthreads();\n        float sum", "}\n        float sum"),
    Fault("cuda/chunked/levels_gradient.cuh", "__syncwarp();\n            add(block);", "add(block);"),
    Fault(
        "cuda/chunked/levels_gradient.cuh",
        "strip.write(by.from(row, 0));\n        __syncwarp();",
        "strip.write(by.from(row, 0));",
    ),
    Fault("cuda/chunked/levels_gradient.cuh", "= expf(log);\n        __syncthreads();", "= expf(log);"),
    without("cuda/chunked/outputs.cu", "                __syncthreads();  // nobody reads decays of others any more\n"),
    Fault("cuda/chunked/levels_gradient.cuh", "d_late[t] = weight * early[t];", "d_late[t] = 0.0f;"),
    without("cuda/chunked/outputs.cu", "        if constexpr (Values) scores.write(shared.pairs.from(row, 0));\n"),
    Fault(
        "cuda/chunked/outputs.cu", "shared.update.from(row, first), of.column", "shared.update.from(row, 0), of.column"
    ),
    without("cuda/chunked/levels_gradient.cuh", "            d_early[t] += weight * late[t];\n"),
    Fault("cuda/chunked/gradients.cu", "? -x : 0.0f", "? -x : -x"),
    without("cuda/chunked/gradients.cu", "            passed = 0.0f;\n"),
    Fault("cuda/chunked/gradients.cu", "= to(s, row + j) = x;", "= x;"),
    Fault("cuda/chunked/gradients.cu", "steps.beta(row + t) * shared.erase.get", "shared.erase.get"),
    without("cuda/chunked/gradients.cu", "d_erase.dot(d_beta, shared.erase.from(row, 0));"),
    without("cuda/chunked/gradients.cu", "by_beta(d_erase);"),
    Fault("cuda/chunked/gradients.cu", "if (p.erase.data == nullptr)\n", "if (false)\n"),
    Fault("cuda/chunked/gradients.cu", "at.copy(shared.k, written,", "at.copy(shared.k, p.k,"),
    without(
        "cuda/chunked/gradients.cu",
        "                        copy_states(key, value);\n                        arrive();\n",
    ),
    # And of values
    without("cuda/chunked/walk.cu", "x *= shared.decays(stage, Keys * parts + column - first + j);"),
    Fault("cuda/chunked/walk.cu", "w.pass.values ? slice.value_decays_of", "false ? slice.value_decays_of"),
    without("cuda/chunked/local.cu", "        turned.log_key_decay = given.log_value_decay;\n"),
    without("cuda/chunked/slices.h", "        std::swap(s.rest, s.d_rest);\n"),
    Fault("cuda/chunked/levels.cuh", "gates, 1.0f, first + kHalf, kHalf", "gates, 1.0f, first, kHalf"),
    Fault("cuda/chunked/levels.cuh", "i < middle ? i > block : i < block", "i < middle && i > block"),
    without("cuda/chunked/gradients.cu", ", of_values.log_key_decay = p.log_value_decay"),
    Fault("cuda/chunked/gradients.cu", "product * slice.value_decays_of(at.local, at.n)[value + j]", "product"),
    without("cuda/chunked/levels_gradient.cuh", "if constexpr (sizeof(F) == 2) add(rest);"),
    # Sequences divided in time
    Fault(
        "cuda/carried_states.cuh",
        "passed(index, sizes, row, column) * state + place",
        "state + place",
    ),
    Fault(
        "cuda/carried_states.cuh",
        "(reverse ? segments - 1 - step : step) * heads + head",
        "step * heads + head",
    ),
    Fault(
        "cuda/carried_states.cuh",
        "sums[2] += by * x.z",
        "sums[2] -= by * x.z",
    ),
    Fault("cuda/carried_states.cuh", "k += Columns", "k += 2 * Columns"),
    # A step
    Fault("cuda/recurrent/step.cu", "state[r].x[c] *= decay * z[c];", "state[r].x[c] *= decay;"),
    Fault("cuda/recurrent/step.cu", "v[c] -= retrieved[c];", "v[c] -= write * retrieved[c];"),
    Fault("cuda/recurrent/step.cu", "if (call.complement) write =", "if (false) write ="),
    Fault(
        "cuda/recurrent/step.cu",
        "for (int w = 0; w < warps; ++w) {\n            const Group part",
        "for (int w = 1; w < warps; ++w) {\n            const Group part",
    ),
)

FAULTS = {"cpu": CPU, "cuda": CUDA}


class CpuKernels:
    """Compiles the library with a fault in one part of it; the parts that have none are compiled once.

    With -O1, at a third of the time that -O3 takes.
    """

    def __init__(self) -> None:
        self.plan = native_build.plan_cpu(Torch.find(), sanitize=False)
        code = "from fairseq_fastweights.ops import native; print(native.cpu_instruction_set())"
        run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        self.variant = f"kernels, {run.stdout.strip()}, "
        folder = WORK / "cpu"
        folder.mkdir(parents=True, exist_ok=True)
        self.objects: dict[str, Path] = {}
        for part in self.plan.compilations:
            self.objects[part.title] = folder / f"{part.title.replace(', ', '-')}.o"
            self.compile(part.command, part.source, self.objects[part.title])

    @staticmethod
    def compile(command: Sequence[str], source: Path, target: Path) -> None:
        subprocess.run([*command, "-O1", "-w", "-c", str(source), "-o", str(target)], check=True)

    def build(self, copy: Path, fault: Fault | None) -> dict[str, str]:
        """Compiles what the fault changed in a copy; returns the environment in which tests take that library."""
        changed = "binding" if fault and fault.path.endswith("binding.cpp") else self.variant
        objects = dict(self.objects)
        for part in self.plan.compilations:
            if fault and part.title.startswith(changed):
                objects[part.title] = copy / f"fault {part.title}.o"
                self.compile(part.command, copy / part.source.relative_to(ROOT), objects[part.title])
        library = copy / "fault.so"
        parts = [*map(str, objects.values()), *self.plan.link_libraries, "-o", str(library)]
        subprocess.run([*self.plan.link, *parts], check=True)
        return {"FASTWEIGHTS_NATIVE_CPU": str(library)}


def outcome(fault: Fault | None, copy: Path, kernels: CpuKernels | None) -> str:
    """The tests that notice the fault: "fast" ones, "slow" ones, or none ("survived"). Without one: fast ones."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "build", "__pycache__"))
    if fault is not None:
        fault.apply(copy)
    # The emulator's tests compile for themselves, and each file once for what is in it.
    compiled = ROOT / "build" / "emulation"
    compiled.mkdir(parents=True, exist_ok=True)
    (copy / "build").mkdir()
    (copy / "build" / "emulation").symlink_to(compiled)
    changes = kernels.build(copy, fault) if kernels else {}
    environment = os.environ | changes | {"PYTHONPATH": f"{copy}{os.pathsep}{copy / 'tools'}", "OMP_NUM_THREADS": "1"}
    tests = "tests/ops" if kernels else "tests/cuda"
    for kind, marks in list(MARKS.items())[: 2 if fault else 1]:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", marks, tests]
        with (copy / "output.txt").open("w") as output:
            try:
                run = subprocess.run(command, cwd=copy, env=environment, stdout=output, stderr=output, timeout=LONGEST)
            except subprocess.TimeoutExpired:
                return kind
        if run.returncode not in (0, 5):  # 5: none of these tests
            return kind
    return "survived"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Counts the faults in the compiled kernels that the tests notice.")
    parser.add_argument("parts", nargs="*", default=list(FAULTS), help=f"of {', '.join(FAULTS)} (default: both)")
    parser.add_argument("--files", default="", metavar="WORD", help="only faults of files whose paths have it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="trials side by side")
    parser.add_argument("--out", type=Path, default=WORK / "faults.jsonl", help="a line for each fault")
    options = parser.parse_args(arguments)
    WORK.mkdir(parents=True, exist_ok=True)
    options.out.unlink(missing_ok=True)
    for part in options.parts:
        kernels = CpuKernels() if part == "cpu" else None
        if outcome(None, WORK / "copy-0", kernels) != "survived":
            parser.exit(1, f"error: tests fail without a fault: {WORK / 'copy-0' / 'output.txt'} says which\n")
        free = list(range(options.jobs))

        def tried(fault: Fault, kernels: CpuKernels | None = kernels, free: list[int] = free) -> str:
            number = free.pop()
            result = outcome(fault, WORK / f"copy-{number}", kernels)
            free.append(number)
            with options.out.open("a") as out:
                out.write(json.dumps({**asdict(fault), "outcome": result}) + "\n")
            if result == "survived":
                print(f"survived: {fault.path}: {fault.text!r} -> {fault.instead!r}", flush=True)
            return result

        with ThreadPoolExecutor(options.jobs) as pool:
            found = Counter(pool.map(tried, (fault for fault in FAULTS[part] if options.files in fault.path)))
        count, fast = found.total(), found["fast"]
        print(f"{part}: of {count} faults fast tests catch {fast}, all tests {count - found['survived']}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
