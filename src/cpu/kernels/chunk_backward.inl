// chunk_backward of one (sequence, q/k head): a first walk over the segments stashes the state before each (and the errors of
// every token), a second one from the end recomputes the states inside a segment and walks its chunks backwards. Included after
// chunk_backward_reverse.inl.

/// Gradients of the gate and of beta of one chunk, from the parts that the products left.
template <class Dot>
inline void finish_gates(const BackwardRun<Dot>& run, const ChunkPlace& place, std::int64_t member, const StateDot& state_dot,
                         const float* rows_dot) {
  const BackwardScratch<Dot>& scratch = run.scratch;
  const std::int64_t head = run.head_v(member);
  const Gates& gates = scratch.gates[place.in_segment];
  const Vec numbers = lane_numbers();
  double d_decay[kTokens];
  Vec crossing[kLaneBlocks] = {};  // sum over j < t of flow_ij, in lane i
  double before = static_cast<double>(gates.total) * state_dot.sum;
  for (std::int64_t t = 0; t < place.tokens; ++t) {
    Vec total = zero();
    for (std::int64_t l = t / kWidth; l < kLaneBlocks; ++l) total = add(total, from_token(crossing[l], l, t, numbers));
    d_decay[t] = before + static_cast<double>(sum(total));
    before += static_cast<double>(gates.beta[t] * sum(load(scratch.write_sums + t * kWidth)));
    for (std::int64_t l = t / kWidth; l < kLaneBlocks; ++l) {
      crossing[l] = add(crossing[l], load(scratch.flow + t * kTokens + l * kWidth));
    }
  }
  double after = 0.0;
  for (std::int64_t t = place.tokens - 1; t >= 0; --t) {
    after += static_cast<double>(rows_dot[t]);
    d_decay[t] += after;
  }
  float d_beta[kTokens];
  for (std::int64_t t = 0; t < place.tokens; ++t) d_beta[t] = sum(load(scratch.beta_sums + t * kWidth));
  if constexpr (Packing<Dot>::kCopies) check_gate_gradients(run, place, member, state_dot.rounded, d_decay, d_beta);
  store_gate_gradients(run.arguments, run.batch, place.token, place.position, head, place.tokens, d_decay,
                       run.item.gate_sums + member * 2);
  if (run.arguments.d_beta.present()) {
    store_beta_gradients(run.arguments, run.batch, place.token, head, place.tokens, d_beta);
  }
}

/// What is read after the segment of one value head whose errors are being solved for: the next values, after the group's last
/// the next keys, and where the second walk follows what its first chunk wants.
template <class Dot>
inline void prefetch_forwards(const BackwardRun<Dot>& run, std::int64_t member, std::int64_t segment) {
  const bool last_member = member + 1 == run.shape.group, turn = segment + 1 == run.segments;
  const std::int64_t next = last_member ? segment + 1 : segment, head = run.head_v(last_member ? 0 : member + 1);
  run.prefetch.clear();
  if (turn) {
    const ChunkPlace place = chunk_at(run, run.end_of_segment(segment) - 1);
    run.prefetch.add_rows(run.arguments.d_o, run.batch, place.token, run.head_v(member), place.tokens, run.shape.dim_v);
    run.prefetch.add_rows(run.arguments.d_v, run.batch, place.token, run.head_v(member), place.tokens, run.shape.dim_v);
  }
  for (std::int64_t index = next * run.shape.chunks_per_segment; index < run.end_of_segment(next); ++index) {
    const ChunkPlace place = chunk_at(run, index);
    run.prefetch.add_rows(run.inputs.v, run.batch, place.token, head, place.tokens, run.shape.dim_v);
    if (!last_member) continue;
    run.prefetch.add_rows(run.inputs.k, run.batch, place.token, run.item.head_qk, place.tokens, run.shape.dim_k);
    if (next + 1 < run.segments) continue;
    run.prefetch.add_rows(run.inputs.q, run.batch, place.token, run.item.head_qk, place.tokens, run.shape.dim_k);
  }
}

/// Whether the second walk finds the errors of a segment, rather than solving for them.
template <class Dot>
inline bool errors_known(const BackwardRun<Dot>& run, std::int64_t segment) {
  return run.shape.saved || (run.shape.errors_kept && segment + 1 < run.segments);
}

/// Errors of a chunk, once they have been solved for or if they were saved; rows past the chunk's tokens are zero.
template <class Dot>
inline const float* known_errors(const BackwardRun<Dot>& run, const ChunkPlace& place, std::int64_t member) {
  if (run.shape.saved && place.tokens == kTokens) return run.saved_errors(member, place.position, kTokens);
  return run.errors(member, place.index, place.in_segment);
}

/// What the first walk, or the forward, left of the value head and segment that the second walk comes to next: the errors while
/// it is at the first chunk of the one before, the state earlier.
template <class Dot>
inline void prefetch_known(const BackwardRun<Dot>& run, const ChunkPlace& place, std::int64_t member, std::int64_t segment) {
  if (place.in_segment > 0) {
    run.prefetch.add(run.state_before(member, segment), run.shape.state() * static_cast<std::int64_t>(sizeof(float)));
    return;
  }
  for (std::int64_t index = segment * run.shape.chunks_per_segment; index < run.end_of_segment(segment); ++index) {
    const ChunkPlace next = chunk_at(run, index);
    run.prefetch.add(known_errors(run, next, member),
                     next.tokens * run.shape.padded_v * static_cast<std::int64_t>(sizeof(float)));
  }
}

/// What is read and written after this chunk of the second walk: the next d_o and d_v; after the group's last value head also
/// this segment's d_q and d_k and the next one's q and k.
template <class Dot>
inline void prefetch_backwards(const BackwardRun<Dot>& run, const ChunkPlace& place, std::int64_t member) {
  const std::int64_t segment = place.index / run.shape.chunks_per_segment, head_qk = run.item.head_qk;
  const bool last_member = member + 1 == run.shape.group, stay = place.in_segment > 0;
  run.prefetch.clear();
  if (place.index > 0 || !last_member) {
    const ChunkPlace next = chunk_at(run, stay || last_member ? place.index - 1 : run.end_of_segment(segment) - 1);
    const std::int64_t head = run.head_v(stay ? member : last_member ? 0 : member + 1);
    run.prefetch.add_rows(run.arguments.d_o, run.batch, next.token, head, next.tokens, run.shape.dim_v);
    run.prefetch.add_rows(run.arguments.d_v, run.batch, next.token, head, next.tokens, run.shape.dim_v);
  }
  if (last_member) {
    run.prefetch.add_rows(run.arguments.d_q, run.batch, place.token, head_qk, place.tokens, run.shape.dim_k);
    run.prefetch.add_rows(run.arguments.d_k, run.batch, place.token, head_qk, place.tokens, run.shape.dim_k);
    if (segment > 0) {
      const ChunkPlace rows = chunk_at(run, place.index - run.shape.chunks_per_segment);
      run.prefetch.add_rows(run.inputs.q, run.batch, rows.token, head_qk, rows.tokens, run.shape.dim_k);
      run.prefetch.add_rows(run.inputs.k, run.batch, rows.token, head_qk, rows.tokens, run.shape.dim_k);
    }
  }
  const std::int64_t next_segment = segment - last_member;
  if (next_segment >= 0 && errors_known(run, next_segment)) {
    prefetch_known(run, place, last_member ? 0 : member + 1, next_segment);
  } else if (!last_member) {
    run.prefetch.add_rows(run.inputs.v, run.batch, place.token, run.head_v(member + 1), place.tokens, run.shape.dim_v);
  }
}

/// The saved errors of a sequence's last tokens, where they do not fill a chunk, into the scratch of a whole one.
template <class Dot>
inline void complete_errors(const BackwardRun<Dot>& run, const ChunkPlace& place, std::int64_t member) {
  if (place.tokens == kTokens) return;
  const float* from = run.saved_errors(member, place.position, place.tokens);
  float* const to = run.errors(member, place.index, place.in_segment);
  for (std::int64_t p = 0; p < run.panels; ++p) {
    for (std::int64_t i = 0; i < kTokens * kPanel; i += kWidth) {
      const bool there = i < place.tokens * kPanel;
      store(to + p * kTokens * kPanel + i, there ? load(from + p * place.tokens * kPanel + i) : zero());
    }
  }
}

/// `state`, `d_state`: S before and dS after the chunk. dS before it goes to `to`.
template <class Dot>
inline void reverse_chunk(const BackwardRun<Dot>& run, const ChunkPlace& place, std::int64_t member, const typename Dot::B* state,
                          const StateForms<Dot>& d_state, const StateForms<Dot>& to) {
  const Gates& gates = run.scratch.gates[place.in_segment];
  const float* errors = known_errors(run, place, member);
  const std::int64_t head = run.head_v(member);
  alignas(64) float rows_dot[kTokens] = {};
  StateDot dot;
  const bool retreats = run.d_state_is_wanted(place) || !run.state_is_zero(place);
  prefetch_backwards(run, place, member);
  prepare_reverse(run, place, gates);
  for (std::int64_t p = 0; p < run.panels; ++p) {
    const std::int64_t at = p * run.shape.padded_k * kPanel, row = at / Dot::kPair;
    prepare_d_o(run, place, gates, head, p);
    solve_d(run, place, gates, head, p, errors + p * kTokens * kPanel, d_state.panels + at);
    if (retreats) retreat_state(run, place, gates, p, state + row, d_state.panels + at, to.panels + at, to.rows + row, dot);
  }
  multiply_errors(run, place, gates);
  reader_gradients(run, place, gates, member, state, rows_dot);
  writer_gradients(run, place, gates, d_state.rows);
  finish_gates(run, place, member, dot, rows_dot);
}

/// Fills in the copy of the rows of panel p of the state before a chunk of the segment.
template <class Dot>
FLASHQLA_INLINE void finish_state_rows(const BackwardRun<Dot>& run, const float* panel, std::int64_t in_segment, std::int64_t p) {
  if constexpr (Packing<Dot>::kCopies) {
    const std::int64_t rows = run.shape.padded_k;
    run.scratch.state_squares[in_segment * (run.shape.padded_v / kPanel) + p] = Packing<Dot>::fix_state_rows(
        panel, rows, run.scratch.state_rows + (in_segment * run.shape.state() + p * rows * kPanel) / Dot::kPair,
        run.scratch.state_worth + in_segment * run.shape.padded_v + p * kPanel);
  }
}

/// Of panel p, the state after a chunk that is not the segment's last to where the second walk finds it. Returns its panel.
template <class Dot>
inline const float* advance_inside(const BackwardRun<Dot>& run, const ChunkPlace& place, const Gates& gates, std::int64_t p,
                                   const float* state) {
  if constexpr (Packing<Dot>::kCopies) {
    float* const after = run.scratch.state_panel;
    advance_state(run, place, gates, state, after);
    finish_state_rows(run, after, place.in_segment + 1, p);
    return after;
  } else {
    float* const after = run.scratch.states + place.in_segment * run.shape.state() + p * run.shape.padded_k * kPanel;
    advance_state(run, place, gates, state, after);
    return after;
  }
}

enum class Errors { unknown, known };

/// Of the chunks of a segment of one value head: the errors, unless they are known, and either (`next` absent) the states before
/// all but the first, or the state after the last. Panels of V are independent of each other: one goes through the whole segment
/// while it is in the first-level cache.
template <class Dot>
inline void replay_segment(const BackwardRun<Dot>& run, std::int64_t member, std::int64_t segment, Errors known, float* next) {
  const std::int64_t first = segment * run.shape.chunks_per_segment, last = run.end_of_segment(segment);
  const std::int64_t head = run.head_v(member), panel_size = run.shape.padded_k * kPanel;
  for (std::int64_t index = first; index < last; ++index) {
    const ChunkPlace place = chunk_at(run, index);
    Gates& gates = run.scratch.gates[place.in_segment];
    prepare_gates<kTokens>(run.inputs, run.batch, place.token, place.position, head, place.tokens, gates);
    if (known == Errors::unknown) prepare_solve(run, place, gates);
    if (run.shape.saved) complete_errors(run, place, member);
  }
  if (known == Errors::unknown) prefetch_forwards(run, member, segment);
  for (std::int64_t p = 0; p < run.panels; ++p) {
    const float* state = run.state_before(member, segment) + p * panel_size;
    if (next == nullptr) finish_state_rows(run, state, 0, p);
    for (std::int64_t index = first; index < last; ++index) {
      const ChunkPlace place = chunk_at(run, index);
      const Gates& gates = run.scratch.gates[place.in_segment];
      const std::int64_t at = p * kTokens * kPanel;
      const bool final = index + 1 == last;
      if (known == Errors::unknown) {
        solve_errors(run, place, gates, head, p, state, run.errors(member, index, place.in_segment) + at);
      } else if (next != nullptr || !final) {
        weigh_errors(run, run.scratch.chunks[place.in_segment], gates, known_errors(run, place, member) + at);
      }
      if (next != nullptr) {
        float* const after = final ? next + p * panel_size : run.scratch.state_panel;
        advance_state(run, place, gates, state, after);
        state = after;
      } else if (!final) {
        state = advance_inside(run, place, gates, p, state);
      }
    }
  }
}

/// Stashes the state before every segment but the first, and the errors of all but the last.
template <class Dot>
inline void walk_forwards(const BackwardRun<Dot>& run) {
  const std::int64_t group = run.shape.group;
  for (std::int64_t segment = 0; segment + 1 < run.segments; ++segment) {
    for (std::int64_t index = segment * run.shape.chunks_per_segment; index < run.end_of_segment(segment); ++index) {
      const ChunkPlace place = chunk_at(run, index);
      prepare_rows(run, place, run.inputs.k, 1);
      prepare_key_gram(run, place);
    }
    for (std::int64_t m = 0; m < group; ++m) replay_segment(run, m, segment, Errors::unknown, run.stashed_state(m, segment + 1));
  }
}

/// The gradients of one segment; that of the state before it takes the place of the stashed state.
template <class Dot>
inline void reverse_segment(const BackwardRun<Dot>& run, std::int64_t segment) {
  const std::int64_t first = segment * run.shape.chunks_per_segment, last = run.end_of_segment(segment);
  for (std::int64_t index = first; index < last; ++index) {
    const ChunkPlace place = chunk_at(run, index);
    prepare_rows(run, place, run.inputs.q, 0);
    prepare_rows(run, place, run.inputs.k, 1);
    prepare_gram(run, place);
  }
  const bool is_last = segment + 1 == run.segments;
  for (std::int64_t m = 0; m < run.shape.group; ++m) {
    replay_segment(run, m, segment, errors_known(run, segment) ? Errors::known : Errors::unknown, nullptr);
    const StateForms<Dot>* d_states = run.scratch.d_states;
    StateForms<Dot> d_state = d_states[0];
    if (is_last) {
      load_state(run, run.arguments.d_final_state, run.head_v(m), d_state.panels);
    } else {
      d_state.panels = run.stashed_state(m, segment + 1);
    }
    if constexpr (Packing<Dot>::kCopies) {
      Packing<Dot>::row_words(d_state.panels, run.panels * run.shape.padded_k * kPanel, d_state.rows);
    } else {
      d_state.rows = d_state.panels;
    }
    for (std::int64_t index = last - 1; index >= first; --index) {
      StateForms<Dot> before = d_states[d_state.rows == d_states[0].rows];
      if (Packing<Dot>::kCopies && index == first) before.panels = run.stashed_state(m, segment);  // the state there is copied
      reverse_chunk(run, chunk_at(run, index), m, run.state_rows(m, segment, index - first), d_state, before);
      d_state = before;
    }
    if (!Packing<Dot>::kCopies) copy_state(run, d_state.panels, run.stashed_state(m, segment));
  }
  for (std::int64_t index = first; index < last; ++index) {
    finish_rows(run, chunk_at(run, index), run.arguments.d_q, run.inputs.q, 0);
    finish_rows(run, chunk_at(run, index), run.arguments.d_k, run.inputs.k, 1);
  }
}

/// False if gate_gradients_hold is: the item is to be done again in f32.
template <class Dot>
inline bool backward_item(const BackwardItem& item) {
  PrefetchList prefetch;
  const BackwardRun<Dot> run(item, prefetch);
  const std::int64_t group = run.shape.group;
  for (std::int64_t i = 0; i < 2 * group; ++i) item.gate_sums[i] = 0.0;
  if (run.length == 0) {
    for (std::int64_t m = 0; m < group && run.arguments.d_initial_state.present(); ++m) {
      load_state(run, run.arguments.d_final_state, run.head_v(m), run.scratch.d_states[0].panels);
      store_state(run, run.arguments.d_initial_state, run.head_v(m), run.scratch.d_states[0].panels);
    }
    return true;
  }
  if constexpr (Packing<Dot>::kCopies) begin_gate_checks(run);
  for (std::int64_t m = 0; m < group; ++m) {
    load_state(run, run.arguments.initial_state, run.head_v(m), run.stashed_state(m, 0));
  }
  if (!run.shape.saved) walk_forwards(run);
  for (std::int64_t segment = run.segments - 1; segment >= 0; --segment) reverse_segment(run, segment);
  for (std::int64_t m = 0; m < group; ++m) {
    store_state(run, run.arguments.d_initial_state, run.head_v(m), run.stashed_state(m, 0));
  }
  if constexpr (Packing<Dot>::kCopies) return gate_gradients_hold(run);
  return true;
}

template <class Dot>
inline std::size_t backward_scratch_bytes(const BackwardShape& shape) {
  std::size_t used = 0;
  BackwardScratch<Dot>(shape, nullptr, &used);
  return used;
}
