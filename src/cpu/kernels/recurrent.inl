// The recurrent step: for each slab of the state, every token of its sequence in turn. Included inside an instruction set's
// namespace, after gates.inl and recurrent_slab.inl.
//
// With k.q known, one sweep over the old state S gives all that a token needs (math.md's names; d = exp(g)):
//   e = beta (v - d k S),   o = scale (d q S + (k.q) e),   S <- d S + k^T e
// so that the state is read twice (the second time from the cache) and written once. An f32 state is worked on in the caller's
// own memory where its size allows; any other goes through f32 scratch and is rounded once when it is written.

/// k, q and the gates of up to kPreparedTokens tokens of one value head.
struct PreparedTokens {
  std::int64_t sequence = -1, head_qk = -1, head_v = -1, first = -1;  // of what it holds
  float k_dot_q[kPreparedTokens];
  float decay[kPreparedTokens], decay_again[kPreparedTokens];  // e^g is the product: far_decay.inl
  alignas(64) float beta[64];
};

/// Where the parts of a kernel's scratch lie, in floats.
struct RecurrentScratch {
  float* slab;   // [rows][width] of a slab
  float *k, *q;  // [kPreparedTokens][padded_k]
  float *sum_k, *sum_q, *e;
  std::int64_t padded_k;

  RecurrentScratch(std::byte* scratch, const RecurrentWork& work) {
    const Problem& problem = work.arguments->inputs.problem;
    padded_k = round_up(problem.dim_k, kRecurrentPadding);
    const std::int64_t padded_columns = round_up(work.slab_columns, kRecurrentPadding);
    slab = reinterpret_cast<float*>(scratch);
    k = slab + padded_k * padded_columns;
    q = k + kPreparedTokens * padded_k;
    sum_k = q + kPreparedTokens * padded_k;
    sum_q = sum_k + padded_columns;
    e = sum_q + padded_columns;
  }
};

/// One slab of a state tensor in the caller's memory. Inputs are written only where they are a destination too.
template <class Byte>
inline SlabRows caller_slab(const StateView<Byte>& view, std::int64_t row, std::int64_t head, std::int64_t column) {
  const std::int64_t step = view.layout == StateLayout::key_value ? 1 : view.stride_outer;
  return {const_cast<std::byte*>(view.matrix(row, head)) + column * step * element_bytes(view.dtype), view.dtype,
          view.stride_outer};
}

struct SlabPlace {
  std::int64_t sequence, head, column, columns;

  SlabPlace(const RecurrentWork& work, std::int64_t slab) {
    const Problem& problem = work.arguments->inputs.problem;
    column = slab % work.slabs_per_head * work.slab_columns;
    slab /= work.slabs_per_head;
    head = slab % problem.heads_v;
    sequence = slab / problem.heads_v;
    columns = problem.dim_v - column < work.slab_columns ? problem.dim_v - column : work.slab_columns;
  }
};

/// Fills `prepared` with n tokens from `first` (counted in the sequence) on, unless it holds them already.
inline void prepare_tokens(const InputArguments& in, const SlabPlace& place, std::int64_t first, std::int64_t n,
                           const RecurrentScratch& scratch, PreparedTokens& prepared) {
  const std::int64_t head_qk = place.head / in.group;
  const std::int64_t batch = in.sequences.batch(place.sequence), token = in.sequences.begin(place.sequence) + first;
  const bool same_rows = prepared.sequence == place.sequence && prepared.head_qk == head_qk && prepared.first == first;
  if (!same_rows) {
    const std::int64_t dim_k = in.problem.dim_k, padded = round_up(dim_k, kWidth);
    for (std::int64_t t = 0; t < n; ++t) {
      float *k = scratch.k + t * scratch.padded_k, *q = scratch.q + t * scratch.padded_k;
      load_row(in.k.row(batch, token + t, head_qk), in.k.dtype, dim_k, padded, k);
      load_row(in.q.row(batch, token + t, head_qk), in.q.dtype, dim_k, padded, q);
      if (in.problem.qk_l2norm) {
        normalise_row(k, padded, in.problem.l2norm_eps);
        normalise_row(q, padded, in.problem.l2norm_eps);
      }
      Vec dot = zero();
      for (std::int64_t i = 0; i < padded; i += kWidth) dot = fmadd(load(k + i), load(q + i), dot);
      prepared.k_dot_q[t] = sum(dot);
    }
  }
  if (!same_rows || prepared.head_v != place.head) {
    double log_decay[64];
    load_decays(in, batch, token, first, place.head, n, log_decay);
    load_betas(in, batch, token, place.head, n, prepared.beta);
    for (std::int64_t t = 0; t < n; ++t) {
      const auto high = static_cast<float>(log_decay[t]);
      const auto low = static_cast<float>(log_decay[t] - static_cast<double>(high));
      float factor[kWidth], again[kWidth];
      store_factors({set1(high), set1(low)}, factor, again);
      prepared.decay[t] = factor[0];
      prepared.decay_again[t] = again[0];
    }
  }
  prepared.sequence = place.sequence;
  prepared.head_qk = head_qk;
  prepared.head_v = place.head;
  prepared.first = first;
}

inline void zero_columns(const RecurrentForwardArguments& arguments, const SlabPlace& place) {
  const Sequences& sequences = arguments.inputs.sequences;
  for (std::int64_t t = 0; t < sequences.length(place.sequence); ++t) {
    std::byte* o = arguments.o.row(sequences.batch(place.sequence), sequences.begin(place.sequence) + t, place.head);
    for (std::int64_t c = 0; c < place.columns; c += kWidth)
      store_any(o, arguments.o.dtype, place.column + c, lanes_left(place.columns, c), zero());
  }
}

/// The state that `place` starts from: the caller's memory where the sweeps can use it, else scratch.
inline SlabRows start_of_slab(const RecurrentForwardArguments& arguments, const SlabPlace& place, const SlabShape& shape,
                              const SlabRows& scratch) {
  const std::int64_t row = arguments.states.read_row(place.sequence);
  if (row < 0) {
    float* data = reinterpret_cast<float*>(scratch.data);
    for (std::int64_t i = 0; i < shape.padded_rows * shape.padded_width; i += kWidth) store(data + i, zero());
    return scratch;
  }
  const SlabRows start = caller_slab(arguments.states.initial_state, row, place.head, place.column);
  if (shape.exact()) return start;
  load_slab(shape, start, scratch);
  return scratch;
}

template <Walk kWalk>
inline void step_f32_slab(const SlabShape& shape, const SlabRows& from, const SlabRows& to, const TokenStep& step) {
  if (to.dtype == DType::f32) return step_slab<F32Rows, F32Rows, kWalk>(shape, from, to, step);
  if (to.dtype == DType::bf16) return step_slab<F32Rows, Bf16Rows, kWalk>(shape, from, to, step);
  step_slab<F32Rows, F16Rows, kWalk>(shape, from, to, step);
}

template <class Rows, Walk kWalk>
inline void step_narrow_slab(const SlabShape& shape, const SlabRows& from, const SlabRows& to, const TokenStep& step) {
  if (to.dtype == DType::f32) return step_slab<Rows, F32Rows, kWalk>(shape, from, to, step);
  step_slab<Rows, Rows, kWalk>(shape, from, to, step);
}

/// Either side is f32, or both have one dtype. Only f32 slabs are ever in the cache.
inline void step_slab_of_any(const SlabShape& shape, const SlabRows& from, Walk walk, const SlabRows& to, const TokenStep& step) {
  constexpr Walk kFar = Walk::side_by_side_far;
  if (walk == Walk::in_order) {
    if (from.dtype == DType::f32) return step_f32_slab<Walk::in_order>(shape, from, to, step);
    if (from.dtype == DType::bf16) return step_narrow_slab<Bf16Rows, Walk::in_order>(shape, from, to, step);
    return step_narrow_slab<F16Rows, Walk::in_order>(shape, from, to, step);
  }
  if (from.dtype == DType::bf16) return step_narrow_slab<Bf16Rows, kFar>(shape, from, to, step);
  if (from.dtype == DType::f16) return step_narrow_slab<F16Rows, kFar>(shape, from, to, step);
  if (walk == kFar && to.dtype == DType::f32) return step_slab<F32Rows, F32Rows, kFar>(shape, from, to, step);
  step_f32_slab<Walk::side_by_side>(shape, from, to, step);
}

/// Where the state after a token goes: `kept` and `end` are its destinations (null data: none). Straight to the caller's memory
/// if nothing that is still needed is lost there by rounding, else to scratch.
inline SlabRows update_target(const SlabShape& shape, const SlabRows& slab, const SlabRows& kept, const SlabRows& end,
                              std::int64_t tokens_left, const SlabRows& scratch) {
  if (!shape.exact()) return scratch;
  const bool kept_wanted = kept.data != nullptr, end_wanted = end.data != nullptr && tokens_left == 0;
  if (!kept_wanted && !end_wanted) return scratch;
  const SlabRows& target = kept_wanted ? kept : end;
  if (target.dtype == DType::f32) return target;
  const bool more_readers = tokens_left > 0 || (kept_wanted && end_wanted);
  const bool convertible = slab.dtype == DType::f32 || slab.dtype == target.dtype;
  return !more_readers && convertible ? target : scratch;
}

/// `next`: the state of the slab after this one, or null.
inline void run_slab(const RecurrentWork& work, const SlabPlace& place, const std::byte* next, const RecurrentScratch& scratch,
                     PreparedTokens& prepared) {
  const RecurrentForwardArguments& arguments = *work.arguments;
  const InputArguments& in = arguments.inputs;
  const std::int64_t tokens = in.sequences.length(place.sequence), batch = in.sequences.batch(place.sequence);
  const SlabShape shape = slab_shape(in.problem.state_layout, in.problem.dim_k, place.columns);
  const SlabRows scratch_slab{reinterpret_cast<std::byte*>(scratch.slab), DType::f32, shape.padded_width};
  SlabRows end{};
  const std::int64_t write_row = arguments.states.write_row(place.sequence);
  if (write_row >= 0) end = caller_slab(arguments.states.final_state, write_row, place.head, place.column);

  SlabRows slab = start_of_slab(arguments, place, shape, scratch_slab);
  Walk walk = work.in_order ? Walk::in_order : slab.data == scratch_slab.data ? Walk::side_by_side : Walk::side_by_side_far;
  for (std::int64_t token = 0; token < tokens; ++token) {
    const std::int64_t t = token % kPreparedTokens, tokens_left = tokens - token - 1;
    if (t == 0)
      prepare_tokens(in, place, token, tokens_left + 1 < kPreparedTokens ? tokens_left + 1 : kPreparedTokens, scratch, prepared);
    if (prepared.decay_again[t] != 1.0f) {
      if (slab.data != scratch_slab.data) load_slab(shape, slab, scratch_slab);
      scale_numbers(prepared.decay_again[t], shape.padded_rows * shape.padded_width, scratch.slab);
      slab = scratch_slab;
      if (!work.in_order) walk = Walk::side_by_side;
    }
    SlabRows kept{};
    const std::int64_t kept_row = arguments.token_row(batch, in.sequences.begin(place.sequence) + token);
    if (kept_row >= 0) kept = caller_slab(arguments.token_states, kept_row, place.head, place.column);

    const std::int64_t row = in.sequences.begin(place.sequence) + token;
    TokenStep step;
    step.k = scratch.k + t * scratch.padded_k;
    step.q = scratch.q + t * scratch.padded_k;
    step.decay = prepared.decay[t];
    step.beta = prepared.beta[t];
    step.scale = static_cast<float>(in.scale);
    step.k_dot_q = prepared.k_dot_q[t];
    step.v = in.v.row(batch, row, place.head);
    step.o = arguments.o.row(batch, row, place.head);
    step.v_dtype = in.v.dtype;
    step.o_dtype = arguments.o.dtype;
    step.column = place.column;
    step.columns = place.columns;
    step.sum_k = scratch.sum_k;
    step.sum_q = scratch.sum_q;
    step.e = scratch.e;
    step.next = tokens_left == 0 ? next : nullptr;
    const bool wanted = tokens_left > 0 || kept.data != nullptr || end.data != nullptr;
    const SlabRows to = wanted ? update_target(shape, slab, kept, end, tokens_left, scratch_slab) : SlabRows{};
    step_slab_of_any(shape, slab, walk, to, step);
    if (kept.data != nullptr && to.data != kept.data) store_slab(shape, to, kept);
    slab = to;
    if (!work.in_order) walk = Walk::side_by_side;
  }
  if (end.data != nullptr && slab.data != end.data) store_slab(shape, slab, end);
}

/// Where the state of a slab begins that lies in one piece of the caller's memory; else null.
inline const std::byte* piece_of_slab(const RecurrentForwardArguments& arguments, const SlabPlace& place) {
  const StateView<const std::byte>& states = arguments.states.initial_state;
  const std::int64_t row = arguments.states.read_row(place.sequence), dim_k = arguments.inputs.problem.dim_k;
  const std::int64_t width = states.layout == StateLayout::key_value ? place.columns : dim_k;
  if (row < 0 || states.stride_outer != width) return nullptr;
  return caller_slab(states, row, place.head, place.column).data;
}

inline void run_recurrent_slabs(const RecurrentWork& work, std::int64_t begin, std::int64_t end, std::byte* scratch_bytes) {
  const RecurrentForwardArguments& arguments = *work.arguments;
  const RecurrentScratch scratch(scratch_bytes, work);
  PreparedTokens prepared;
  SlabPlace place(work, begin);
  for (std::int64_t slab = begin; slab < end; ++slab) {
    const SlabPlace next(work, slab + 1);  // past the end: never used
    if (arguments.states.padding(place.sequence)) {
      zero_columns(arguments, place);
    } else {
      const bool ask = work.in_order && slab + 1 < end;
      run_slab(work, place, ask ? piece_of_slab(arguments, next) : nullptr, scratch, prepared);
    }
    place = next;
  }
}
