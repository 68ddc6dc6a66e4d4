#include "harness/case.hpp"

#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <numeric>
#include <sstream>
#include <stdexcept>

namespace flashqla::test {

namespace {

template <class T>
using Names = std::vector<std::pair<const char*, T>>;

const Names<Op> kOps{{"forward", Op::forward}, {"backward", Op::backward}, {"recurrent", Op::recurrent}};
const Names<DType> kDTypes{{"f64", DType::f64}, {"f32", DType::f32}, {"bf16", DType::bf16},
                           {"f16", DType::f16}, {"i64", DType::i64}, {"i32", DType::i32}};
const Names<Gate> kGates{
    {"none", Gate::none}, {"log_decay", Gate::log_decay}, {"computed", Gate::computed}, {"cumulative", Gate::cumulative}};
const Names<Beta> kBetas{
    {"one", Beta::one}, {"given", Beta::given}, {"sigmoid", Beta::sigmoid}, {"doubled_sigmoid", Beta::doubled_sigmoid}};
const Names<StateLayout> kLayouts{{"key_value", StateLayout::key_value}, {"value_key", StateLayout::value_key}};
const Names<Pool> kPools{{"none", Pool::none}, {"separate", Pool::separate}, {"in_place", Pool::in_place}};
const Names<StoredStates> kStored{
    {"none", StoredStates::none}, {"before_chunks", StoredStates::before_chunks}, {"every", StoredStates::every}};
const Names<Data> kData{{"usual", Data::usual},
                        {"strong_decay", Data::strong_decay},
                        {"no_decay", Data::no_decay},
                        {"growth", Data::growth},
                        {"forget", Data::forget},
                        {"beta_zero", Data::beta_zero},
                        {"beta_two", Data::beta_two},
                        {"repeated_keys", Data::repeated_keys},
                        {"unnormalised", Data::unnormalised}};
const Names<Strides> kStrides{{"dense", Strides::dense}, {"padded", Strides::padded},     {"transposed", Strides::transposed},
                              {"fused", Strides::fused}, {"expanded", Strides::expanded}, {"reversed", Strides::reversed},
                              {"huge", Strides::huge}};

struct Key {
  const char* name;
  std::function<void(Case&, const std::string&)> set;
  std::function<std::string(const Case&)> get;
};

template <class T>
Key named(const char* name, T Case::* member, const Names<T>& names) {
  return {name,
          [=, &names](Case& c, const std::string& text) {
            for (const auto& [known, value] : names) {
              if (text == known) return void(c.*member = value);
            }
            throw std::runtime_error(std::string(name) + " cannot be " + text);
          },
          [=, &names](const Case& c) {
            for (const auto& [known, value] : names) {
              if (c.*member == value) return std::string(known);
            }
            return std::string("?");
          }};
}

template <class T>
Key number(const char* name, T Case::* member) {
  return {name, [=](Case& c, const std::string& text) { c.*member = static_cast<T>(std::stoll(text)); },
          [=](const Case& c) { return std::to_string(c.*member); }};
}

Key lengths_key() {
  return {"lengths",
          [](Case& c, const std::string& text) {
            std::istringstream stream(text);
            c.lengths.clear();
            for (std::string length; std::getline(stream, length, '+');) c.lengths.push_back(std::stoll(length));
          },
          [](const Case& c) {
            std::string text;
            for (std::int64_t length : c.lengths) {
              if (!text.empty()) text += '+';
              text += std::to_string(length);
            }
            return text;
          }};
}

Key scale_key() {
  return {"scale", [](Case& c, const std::string& text) { c.scale = std::stod(text); },
          [](const Case& c) { return c.scale ? std::to_string(*c.scale) : std::string(); }};
}

const std::vector<Key>& keys() {
  static const std::vector<Key> kKeys{named("op", &Case::op, kOps),
                                      number("B", &Case::B),
                                      number("T", &Case::T),
                                      number("Hq", &Case::Hq),
                                      number("Hv", &Case::Hv),
                                      number("K", &Case::K),
                                      number("V", &Case::V),
                                      named("dtype", &Case::dtype, kDTypes),
                                      named("gate_dtype", &Case::gate_dtype, kDTypes),
                                      named("state", &Case::state_dtype, kDTypes),
                                      named("index", &Case::index_dtype, kDTypes),
                                      lengths_key(),
                                      number("slack", &Case::slack),
                                      named("gate", &Case::gate, kGates),
                                      number("dt_bias", &Case::dt_bias),
                                      named("beta", &Case::beta, kBetas),
                                      number("l2norm", &Case::l2norm),
                                      scale_key(),
                                      named("layout", &Case::layout, kLayouts),
                                      number("initial", &Case::initial),
                                      number("final", &Case::final),
                                      named("pool", &Case::pool, kPools),
                                      number("drafts", &Case::drafts),
                                      number("token_states", &Case::token_states),
                                      number("token_rows", &Case::token_rows),
                                      number("same_rows", &Case::same_rows),
                                      named("stored", &Case::stored, kStored),
                                      number("states_every", &Case::states_every),
                                      number("stored_rows", &Case::stored_rows),
                                      number("prefix", &Case::prefix),
                                      number("extras", &Case::extras),
                                      number("d_o", &Case::d_o),
                                      number("d_final", &Case::d_final),
                                      number("ones", &Case::ones),
                                      number("f32_gradients", &Case::f32_gradients),
                                      number("saved", &Case::saved),
                                      named("data", &Case::data, kData),
                                      named("strides", &Case::strides, kStrides),
                                      number("seed", &Case::seed)};
  return kKeys;
}

}  // namespace

std::int64_t Case::begin(std::int64_t n) const {
  return packed() ? std::accumulate(lengths.begin(), lengths.begin() + n, std::int64_t{0}) : 0;
}

std::int64_t Case::stored_count(const std::vector<std::int64_t>& prefix_lengths) const {
  std::int64_t count = 0;
  for (std::int64_t n = 0; n < sequences(); ++n) {
    const std::int64_t before = prefix ? prefix_lengths[static_cast<std::size_t>(n)] : 0;
    if (stored == StoredStates::before_chunks) count += (length(n) + kTokensPerChunk - 1) / kTokensPerChunk;
    if (stored == StoredStates::every) count += (before + length(n)) / states_every - before / states_every;
  }
  return count;
}

Case with_lengths(Case c, std::vector<std::int64_t> lengths, std::int64_t slack) {
  c.lengths = std::move(lengths);
  c.slack = slack;
  c.B = 1;
  c.T = std::accumulate(c.lengths.begin(), c.lengths.end(), slack);
  return c;
}

Case parse_case(const std::string& line) {
  Case c;
  std::istringstream stream(line);
  for (std::string word; stream >> word;) {
    const std::size_t equal = word.find('=');
    bool known = false;
    for (const Key& key : keys()) {
      if (word.substr(0, equal) != key.name || equal == std::string::npos) continue;
      key.set(c, word.substr(equal + 1));
      known = true;
    }
    if (!known) throw std::runtime_error("unknown word in a case: " + word);
  }
  return c.packed() ? with_lengths(c, c.lengths, c.slack) : c;
}

std::string to_text(const Case& c) {
  static const Case kDefault;
  std::string text;
  for (const Key& key : keys()) {
    const std::string value = key.get(c);
    if (value == key.get(kDefault)) continue;
    if (!text.empty()) text += ' ';
    text.append(key.name).append("=").append(value);
  }
  return text;
}

std::string case_file(const std::string& name) {
  const char* const folder = std::getenv("FLASHQLA_TEST_CASES");
  return std::string(folder != nullptr ? folder : FLASHQLA_TEST_CASES) + "/" + name;
}

std::vector<Case> load_cases(const std::string& file, const std::string& tag) {
  std::ifstream stream(case_file(file));
  if (!stream) throw std::runtime_error("cannot read tests/cases/" + file);
  std::vector<Case> cases;
  for (std::string line; std::getline(stream, line);) {
    if (line.rfind(tag + ":", 0) == 0) cases.push_back(parse_case(line.substr(tag.size() + 1)));
  }
  if (cases.empty()) throw std::runtime_error("no line tagged " + tag + " in tests/cases/" + file);
  return cases;
}

Problem problem_of(const Case& c) {
  Problem problem;
  problem.batch = c.B;
  problem.tokens = c.T;
  problem.heads_qk = c.Hq;
  problem.heads_v = c.Hv;
  problem.dim_k = c.K;
  problem.dim_v = c.V;
  problem.dtype = c.dtype;
  problem.packed = c.packed();
  problem.num_sequences = c.sequences();
  problem.gate = c.gate;
  problem.beta = c.beta;
  problem.qk_l2norm = c.l2norm;
  problem.scale = c.scale;
  problem.state_layout = c.layout;
  return problem;
}

}  // namespace flashqla::test
