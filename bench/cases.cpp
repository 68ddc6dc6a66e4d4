#include "bench/cases.hpp"

#include <sstream>
#include <stdexcept>
#include <utility>

namespace flashqla::bench {
namespace {

template <class Value>
struct Choice {
  const char* name;
  Value value;
};

constexpr Choice<Op> kOps[] = {{"forward", Op::forward}, {"backward", Op::backward}, {"recurrent", Op::recurrent}};
constexpr Choice<DType> kDTypes[] = {{"f32", DType::f32}, {"bf16", DType::bf16}, {"f16", DType::f16}};
constexpr Choice<StateLayout> kLayouts[] = {{"key_value", StateLayout::key_value}, {"value_key", StateLayout::value_key}};
constexpr Choice<bool> kNoYes[] = {{"no", false}, {"yes", true}};
constexpr Choice<Temperature> kTemperatures[] = {{"cold", Temperature::cold}, {"warm", Temperature::warm}};

template <class Value, std::size_t N>
Value choose(const Choice<Value> (&choices)[N], const std::string& name) {
  for (const Choice<Value>& choice : choices)
    if (name == choice.name) return choice.value;
  throw std::runtime_error("unknown value '" + name + "'");
}

template <class Value, std::size_t N>
const char* find_name(const Choice<Value> (&choices)[N], Value value) {
  for (const Choice<Value>& choice : choices)
    if (value == choice.value) return choice.name;
  return "";
}

std::int64_t positive(const std::string& text) {
  std::size_t end = 0;
  const std::int64_t value = std::stoll(text, &end);
  if (end != text.size() || value < 1) throw std::runtime_error("expected a positive number, got '" + text + "'");
  return value;
}

void set(Case& result, const std::string& key, const std::string& value) {
  const std::pair<const char*, std::int64_t Case::*> numbers[] = {{"B", &Case::batch},     {"T", &Case::tokens},
                                                                  {"Hq", &Case::heads_qk}, {"Hv", &Case::heads_v},
                                                                  {"K", &Case::dim_k},     {"V", &Case::dim_v}};
  for (const auto& [name, member] : numbers) {
    if (key != name) continue;
    result.*member = positive(value);
    return;
  }
  if (key == "op") {
    result.op = choose(kOps, value);
  } else if (key == "dtype") {
    result.dtype = choose(kDTypes, value);
  } else if (key == "state") {
    result.state_dtype = choose(kDTypes, value);
  } else if (key == "layout") {
    result.layout = choose(kLayouts, value);
  } else if (key == "states") {
    result.states = choose(kTemperatures, value);
  } else if (key == "saved") {
    result.saved = choose(kNoYes, value);
  } else if (key == "threads") {
    result.threads = static_cast<int>(positive(value));
  } else if (key == "implementation") {
    result.implementation = value;
  } else {
    throw std::runtime_error("unknown key '" + key + "'");
  }
}

std::vector<Case> expand(const std::string& line) {
  std::vector<Case> cases(1);
  std::istringstream words(line);
  for (std::string word; words >> word;) {
    const std::size_t equals = word.find('=');
    if (equals == std::string::npos) throw std::runtime_error("expected key=value, got '" + word + "'");
    const std::string key = word.substr(0, equals);
    std::vector<Case> expanded;
    for (const Case& old : cases) {
      std::istringstream values(word.substr(equals + 1));
      for (std::string value; std::getline(values, value, ',');) {
        expanded.push_back(old);
        set(expanded.back(), key, value);
        expanded.back().text += (old.text.empty() ? "" : " ") + key + "=" + value;
      }
    }
    cases = std::move(expanded);
  }
  return cases;
}

}  // namespace

std::vector<Case> read_cases(std::istream& stream) {
  std::vector<Case> cases;
  int number = 0;
  for (std::string line; std::getline(stream, line);) {
    ++number;
    line = line.substr(0, line.find('#'));
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    try {
      for (Case& expanded : expand(line)) cases.push_back(std::move(expanded));
    } catch (const std::exception& error) {
      throw std::runtime_error("line " + std::to_string(number) + ": " + error.what());
    }
  }
  return cases;
}

const char* name_of(Op op) { return find_name(kOps, op); }
const char* name_of(Temperature states) { return find_name(kTemperatures, states); }
const char* name_of(StateLayout layout) { return find_name(kLayouts, layout); }
const char* short_name_of(DType dtype) { return find_name(kDTypes, dtype); }

}  // namespace flashqla::bench
