// chunk_forward of a whole call: cuts the work into items, walks each item's sequence chunk by chunk, and moves states. Included
// inside an instruction set's namespace, after chunk_forward.inl and chunk_inverse.inl.
#pragma once

#include "cpu/kernels/chunk_forward.inl"
#include "cpu/kernels/chunk_inverse.inl"

/// How the work is cut: an item is one sequence, some q/k heads with all their value heads or one q/k head with some of them, and
/// some slabs of columns. Cuts never change a result, since every column sees the same arithmetic in any item; they only repeat
/// the products of keys.
struct ForwardSplit {
  std::int64_t heads_qk = 0, group = 0, dim_v = 0;
  std::int64_t keys = 0, key_parts = 0;    // q/k heads of an item, parts of all of them
  std::int64_t heads = 0, head_parts = 0;  // value heads of each of its q/k heads, parts of a group; one part unless keys is 1
  std::int64_t slabs = 0, slab_parts = 0;  // slabs of an item, parts of V
  std::int64_t items = 0;
};

/// Memory for the states of an item. Neighbouring heads share the pages of q, k, v and o, which makes an item of several heads
/// cheaper; but the states are read and written at every chunk and should stay in the second-level cache.
inline constexpr std::int64_t kStateBytes = kRegisters == 32 ? 512 * 1024 : 256 * 1024;

/// Errors from a rounded state are too coarse for the backward.
template <class Dot>
inline constexpr bool kSaves = !kPacked<Dot>;

template <class Dot>
constexpr std::int64_t padded_k_of(const Problem& problem) {
  return round_up(problem.dim_k, kWidth * Dot::kPair);
}

constexpr std::int64_t parts_of(std::int64_t whole, std::int64_t part) { return (whole + part - 1) / part; }

template <class Dot>
inline ForwardSplit split_forward(const Problem& problem, std::int64_t sequences, int threads) {
  ForwardSplit split;
  split.heads_qk = problem.heads_qk;
  split.group = problem.heads_v / problem.heads_qk;
  split.dim_v = problem.dim_v;
  const std::int64_t state_bytes = padded_k_of<Dot>(problem) * round_up(problem.dim_v, kWidth) * (kPacked<Dot> ? 6 : 4);
  const std::int64_t fit = state_bytes < kStateBytes ? kStateBytes / state_bytes : 1;
  split.keys = fit < split.group ? 1 : fit / split.group < split.heads_qk ? fit / split.group : split.heads_qk;
  split.heads = fit < split.group ? fit : split.group;
  const std::int64_t all_slabs = parts_of(problem.dim_v, kSlabColumns);
  split.slabs = all_slabs;
  const auto enough = [&] {
    split.key_parts = parts_of(split.heads_qk, split.keys);
    split.head_parts = parts_of(split.group, split.heads);
    split.slab_parts = parts_of(all_slabs, split.slabs);
    split.items = sequences * split.key_parts * split.head_parts * split.slab_parts;
    return threads <= 1 || split.items >= 2 * threads;
  };
  while (!enough()) {
    if (split.keys > 1) {
      --split.keys;
    } else if (split.heads > 1) {
      --split.heads;
    } else if (split.slabs > 1) {
      --split.slabs;
    } else {
      break;
    }
  }
  return split;
}

struct ForwardItem {
  std::int64_t sequence, group;
  std::int64_t first_head, heads;  // value heads [first_head, first_head + heads)
  SlabRange range;

  std::int64_t head_qk(std::int64_t h) const { return (first_head + h) / group; }
};

inline ForwardItem forward_item(const ForwardSplit& split, std::int64_t index) {
  ForwardItem item;
  const std::int64_t slab_part = index % split.slab_parts;
  index /= split.slab_parts;
  const std::int64_t head_part = index % split.head_parts;
  index /= split.head_parts;
  const std::int64_t first_key = index % split.key_parts * split.keys;
  item.sequence = index / split.key_parts;
  item.group = split.group;
  const std::int64_t first = head_part * split.heads;
  const std::int64_t keys = split.keys < split.heads_qk - first_key ? split.keys : split.heads_qk - first_key;
  const std::int64_t heads = split.heads < split.group - first ? split.heads : split.group - first;
  item.first_head = first_key * split.group + first;
  item.heads = keys * heads;
  const std::int64_t begin = slab_part * split.slabs * kSlabColumns, end = begin + split.slabs * kSlabColumns;
  item.range = {begin, end < split.dim_v ? end : split.dim_v};
  return item;
}

/// Elements [begin, end) of rows [token, token + n) of one head become zero.
inline void zero_rows(const MutableTokenView& view, std::int64_t batch, std::int64_t token, std::int64_t n, std::int64_t head,
                      std::int64_t begin, std::int64_t end) {
  const std::int64_t bytes = element_bytes(view.dtype);
  for (std::int64_t t = 0; t < n; ++t)
    __builtin_memset(view.row(batch, token + t, head) + begin * bytes, 0, static_cast<std::size_t>((end - begin) * bytes));
}

/// Cumulative log decays as callers see them: restarting every kTokensPerChunk tokens of the sequence, no token below -128.
inline void store_cumulative(const ChunkForwardArguments& arguments, std::int64_t sequence, std::int64_t head) {
  const InputArguments& in = arguments.inputs;
  const std::int64_t batch = in.sequences.batch(sequence), begin = in.sequences.begin(sequence),
                     length = in.sequences.length(sequence);
  for (std::int64_t t = 0; t < length; t += kTokensPerChunk) {
    const std::int64_t n = length - t < kTokensPerChunk ? length - t : kTokensPerChunk;
    double raw[kTokensPerChunk], sum = 0.0;
    load_decays(in, batch, begin + t, t, head, n, raw);
    for (std::int64_t i = 0; i < n; ++i) {
      sum += raw[i] < -128.0 ? -128.0 : raw[i];
      arguments.g_cumulative.store(batch, begin + t + i, head, 0, sum);
    }
  }
}

/// What the h-th value head of an item fetches of the next chunk: its share of the tokens, with all heads of the item, so that
/// rows that lie side by side are fetched side by side.
template <int kTokens>
inline void plan_prefetch(const ChunkForwardArguments& arguments, const ForwardItem& item, std::int64_t batch, std::int64_t token,
                          std::int64_t end, std::int64_t h, PrefetchList& soon) {
  const InputArguments& in = arguments.inputs;
  const std::int64_t share = parts_of(kTokens, item.heads), from = token + kTokens + h * share;
  const auto add = [&](const auto& view, std::int64_t first_head, std::int64_t last_head, std::int64_t element,
                       std::int64_t width) {
    const std::int64_t bytes = element_bytes(view.dtype), heads = last_head - first_head + 1;
    const bool side_by_side = view.stride_head == width;
    for (std::int64_t t = from; t < from + share && t < end; ++t) {
      for (std::int64_t i = 0; i < (side_by_side ? 1 : heads); ++i) {
        const auto* row = reinterpret_cast<const std::byte*>(view.row(batch, t, first_head + i)) + element * bytes;
        soon.add(row, (side_by_side ? heads : 1) * width * bytes);
      }
    }
  };
  const std::int64_t width = item.range.end - item.range.begin, last = item.first_head + item.heads - 1;
  add(in.k, item.head_qk(0), item.head_qk(item.heads - 1), 0, in.problem.dim_k);
  add(in.q, item.head_qk(0), item.head_qk(item.heads - 1), 0, in.problem.dim_k);
  add(in.v, item.first_head, last, item.range.begin, width);
  add(arguments.o, item.first_head, last, item.range.begin, width);
}

template <class Dot, int kTokens>
inline void run_forward_item(const ChunkForwardArguments& arguments, const ForwardItem& item, std::byte* memory) {
  const InputArguments& in = arguments.inputs;
  const std::int64_t batch = in.sequences.batch(item.sequence), begin = in.sequences.begin(item.sequence),
                     length = in.sequences.length(item.sequence), dim_k = in.problem.dim_k,
                     padded_k = padded_k_of<Dot>(in.problem);
  if (arguments.states.padding(item.sequence)) {
    for (std::int64_t h = 0; h < item.heads; ++h)
      zero_rows(arguments.o, batch, begin, length, item.first_head + h, item.range.begin, item.range.end);
    return;
  }
  ForwardScratch<Dot, kTokens> x(memory, padded_k, item.range, item.heads);
  const std::int64_t read_row = arguments.states.read_row(item.sequence), write_row = arguments.states.write_row(item.sequence);
  for (std::int64_t h = 0; h < item.heads; ++h) {
    load_state(arguments.states.initial_state, read_row, item.first_head + h, dim_k, padded_k, item.range, x.state(h));
    pack_state(x, h);
  }
  const auto store_states = [&](const MutableStateView& view, std::int64_t row) {
    for (std::int64_t h = 0; h < item.heads; ++h)
      store_state(x.state(h), item.range, dim_k, padded_k, view, row, item.first_head + h);
  };
  const bool before_chunks = arguments.stored_states == StoredStates::before_chunks,
             every = arguments.stored_states == StoredStates::every;
  std::int64_t place = before_chunks || every ? arguments.stored_begin(item.sequence) : 0;
  const bool saves = kSaves<Dot> && arguments.saved != nullptr;
  const std::int64_t prefix = every ? arguments.prefix(item.sequence) : 0;
  for (std::int64_t t = 0; t < length;) {
    if (before_chunks && t % kTokensPerChunk == 0) store_states(arguments.stored, arguments.stored_row(place++));
    if (saves && t > 0 && t % SavedShape::kSegmentTokens == 0) {
      for (std::int64_t h = 0; h < item.heads; ++h)
        save_state(arguments, item.sequence, t, item.first_head + h, x.state(h), item.range, padded_k);
    }
    const std::int64_t whole = kTokens - (prefix + t) % kTokens, n = whole < length - t ? whole : length - t;
    const bool stores = every && (prefix + t + n) % arguments.states_every == 0;
    x.ends = {t == 0 && read_row < 0, t + n < length || write_row >= 0 || stores};
    for (std::int64_t h = 0; h < item.heads; ++h) {
      if (h == 0 || item.head_qk(h) != item.head_qk(h - 1)) prepare_keys(x, in, batch, begin + t, item.head_qk(h), n);
      PrefetchList soon;
      plan_prefetch<kTokens>(arguments, item, batch, begin + t, begin + length, h, soon);
      const std::int64_t head = item.first_head + h;
      const SavedErrors errors = saves ? SavedErrors(arguments, item.sequence, t, head) : SavedErrors();
      advance_head(x, arguments, batch, begin + t, t, head, h, n, errors, soon);
    }
    t += n;
    if (stores) store_states(arguments.stored, arguments.stored_row(place++));
  }
  store_states(arguments.states.final_state, write_row);
  if (arguments.g_cumulative.present() && item.range.begin == 0) {
    for (std::int64_t h = 0; h < item.heads; ++h) store_cumulative(arguments, item.sequence, item.first_head + h);
  }
}

/// Rows past the last offset belong to no sequence.
inline void zero_slack(const ChunkForwardArguments& arguments, const Parallel& parallel) {
  const InputArguments& in = arguments.inputs;
  constexpr std::int64_t kRows = 256;
  const std::int64_t end = in.sequences.end(), rows = in.sequences.tokens - end;
  if (!in.sequences.packed() || rows <= 0) return;
  for_each_item(parallel, (rows + kRows - 1) / kRows, [&](std::int64_t, std::int64_t item) {
    const std::int64_t token = end + item * kRows, left = in.sequences.tokens - token, n = left < kRows ? left : kRows;
    for (std::int64_t h = 0; h < in.problem.heads_v; ++h) {
      zero_rows(arguments.o, 0, token, n, h, 0, in.problem.dim_v);
      if (arguments.g_cumulative.present()) zero_rows(arguments.g_cumulative, 0, token, n, h, 0, 1);
      if (arguments.a.present()) zero_rows(arguments.a, 0, token, n, h, 0, kTokensPerChunk);
    }
  });
}

template <class Dot, int kTokens>
inline std::size_t forward_slot_bytes(const Problem& problem) {
  const ForwardSplit split = split_forward<Dot>(problem, 1, 1);
  const ForwardScratch<Dot, kTokens> scratch(nullptr, padded_k_of<Dot>(problem), {0, problem.dim_v}, split.keys * split.heads);
  const std::size_t inverse = InverseScratch(nullptr, round_up(problem.dim_k, kWidth)).bytes;
  return scratch.bytes > inverse ? scratch.bytes : inverse;
}

template <class Dot, int kTokens>
inline void run_chunk_forward(const ChunkForwardArguments& arguments, std::byte* workspace, const Parallel& parallel) {
  const InputArguments& in = arguments.inputs;
  const std::size_t slot_bytes = forward_slot_bytes<Dot, kTokens>(in.problem);
  const ForwardSplit split = split_forward<Dot>(in.problem, in.sequences.count, parallel.threads);
  if (kSaves<Dot> && arguments.saved != nullptr) zero_unsaved(arguments);
  for_each_item(parallel, split.items, [&](std::int64_t slot, std::int64_t item) {
    run_forward_item<Dot, kTokens>(arguments, forward_item(split, item), slot_scratch(workspace, slot_bytes, slot));
  });
  if (arguments.a.present()) {
    for_each_item(parallel, in.sequences.count * in.problem.heads_qk, [&](std::int64_t slot, std::int64_t item) {
      store_inverses(arguments, item / in.problem.heads_qk, item % in.problem.heads_qk,
                     slot_scratch(workspace, slot_bytes, slot));
    });
  }
  zero_slack(arguments, parallel);
  if (kSaves<Dot> && arguments.saved != nullptr) SavedHead::write(arguments.saved, kWidth);
}
