// Checked reading of JSON objects, with uniform messages. Includes nlohmann/json, so include it sparingly.
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "detrt/error.hpp"

namespace detrt {

using Json = nlohmann::json;

constexpr int deepest_json = 100; // a copy of a value calls itself once for each level; a manifest has six

// Text to JSON. Throws Error of `kind`: "NAME cannot be read as JSON (...); WHAT_TO_DO".
inline Json parse_json(const std::string& text, const std::string& name, ErrorKind kind,
                       const std::string& what_to_do) {
  const auto not_too_deep = [&](int depth, Json::parse_event_t, Json&) {
    if (depth > deepest_json)
      throw Error(kind, name + " cannot be read as JSON (it is nested too deeply); " + what_to_do);
    return true;
  };
  try {
    return Json::parse(text, not_too_deep);
  } catch (const Json::exception& error) {
    throw Error(kind, name + " cannot be read as JSON (" + error.what() + "); " + what_to_do);
  }
}

// A JSON object whose errors name the field.
class Fields {
public:
  Fields(const Json& object, std::string where, ErrorKind kind = ErrorKind::spec)
      : object_(object), where_(std::move(where)), kind_(kind) {
    if (!object.is_object())
      fail("must be a JSON object; got " + std::string(object.type_name()));
  }

  [[noreturn]] void fail(const std::string& message) const { throw Error(kind_, where_ + " " + message); }
  [[noreturn]] void fail(const std::string& key, const std::string& message) const {
    throw Error(kind_, where_ + "." + key + " " + message);
  }

  void only(std::initializer_list<const char*> allowed) const {
    const std::set<std::string> names(allowed.begin(), allowed.end());
    for (const auto& entry : object_.items())
      if (names.count(entry.key()) == 0) {
        std::string list;
        for (const std::string& name : names)
          list += (list.empty() ? "" : ", ") + name;
        fail("has the unknown field " + shown(entry.key()) + "; allowed: " + list);
      }
  }

  bool has(const char* key) const { return object_.contains(key) && !object_.at(key).is_null(); }

  const Json& at(const char* key) const {
    if (!object_.contains(key))
      fail("has no field '" + std::string(key) + "'");
    return object_.at(key);
  }

  std::string text(const char* key) const {
    const Json& value = at(key);
    if (!value.is_string())
      fail(key, "must be text; got " + shown(value));
    return value.get<std::string>();
  }
  std::string text(const char* key, const std::string& otherwise) const {
    return object_.contains(key) ? text(key) : otherwise;
  }

  std::int64_t integer(const char* key, std::int64_t low, std::int64_t high) const {
    const Json& value = at(key);
    const bool fits =
        value.is_number_integer() &&
        !(value.is_number_unsigned() && value.get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX));
    if (!fits || value.get<std::int64_t>() < low || value.get<std::int64_t>() > high)
      fail(key,
           "must be an integer from " + std::to_string(low) + " to " + std::to_string(high) + "; got " + shown(value));
    return value.get<std::int64_t>();
  }
  std::int64_t integer(const char* key, std::int64_t low, std::int64_t high, std::int64_t otherwise) const {
    return object_.contains(key) ? integer(key, low, high) : otherwise;
  }

  bool flag(const char* key, bool otherwise) const {
    if (!object_.contains(key))
      return otherwise;
    const Json& value = object_.at(key);
    if (!value.is_boolean())
      fail(key, "must be true or false; got " + shown(value));
    return value.get<bool>();
  }

  double number(const char* key, double otherwise) const {
    if (!object_.contains(key))
      return otherwise;
    const Json& value = object_.at(key);
    if (!value.is_number() || !std::isfinite(value.get<double>()))
      fail(key, "must be a finite number; got " + shown(value));
    return value.get<double>();
  }

  // Index of the value among the allowed names.
  std::size_t one_of(const char* key, std::initializer_list<const char*> allowed) const {
    const Json& value = at(key);
    std::size_t index = 0;
    std::string list;
    for (const char* name : allowed) {
      if (value.is_string() && value.get_ref<const std::string&>() == name)
        return index;
      list += (index++ ? ", " : "") + std::string(name);
    }
    fail(key, "must be one of " + list + "; got " + shown(value));
  }

  const std::string& where() const noexcept { return where_; }

  // A value as short, valid UTF-8 text for a message.
  static std::string shown(const Json& value) {
    std::string text =
        value.is_structured() ? value.type_name() : value.dump(-1, ' ', false, Json::error_handler_t::replace);
    return text.size() > 60 ? text.substr(0, 60) + " ..." : text;
  }

private:
  const Json& object_;
  std::string where_;
  ErrorKind kind_;
};

} // namespace detrt
