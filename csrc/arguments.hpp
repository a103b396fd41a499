// Reads the arguments of Core.step, the one call of a decode step, in Python's memory, and checks them by name.
#pragma once

#include <nanobind/nanobind.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace agentspec {

[[noreturn]] inline void refuse(const std::string& what) { throw nanobind::value_error(what.c_str()); }

// Returns the integer that an object holds; nothing if it is no integer of 32 bits. Truth values are no integers.
inline std::optional<std::int32_t> int32_of(nanobind::handle object) {
  if (!object || !PyIndex_Check(object.ptr()) || PyBool_Check(object.ptr())) return std::nullopt;
  const Py_ssize_t number = PyNumber_AsSsize_t(object.ptr(), nullptr);  // clipped if too large
  const bool fits = !PyErr_Occurred() && number == static_cast<std::int32_t>(number);
  PyErr_Clear();
  return fits ? std::optional(static_cast<std::int32_t>(number)) : std::nullopt;
}

// Returns the integer that an argument holds.
inline std::int32_t integer(nanobind::handle value, const char* name) {
  if (const auto number = int32_of(value)) return *number;
  refuse(std::string(name) + "=" + nanobind::repr(value).c_str() + ": give an integer of 32 bits");
}

// Returns the seconds that an argument holds.
inline double seconds(nanobind::handle value, const char* name) {
  const double number = PyFloat_AsDouble(value.ptr());
  const bool read = !PyErr_Occurred() && !std::isnan(number);
  PyErr_Clear();
  if (read) return number;
  refuse(std::string(name) + "=" + nanobind::repr(value).c_str() + ": give a number of seconds");
}

// Reads the memory of a C-contiguous int32 array in place, and holds it as long as this lives.
class Int32Buffer {
 public:
  explicit Int32Buffer(nanobind::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_ND | PyBUF_FORMAT) != 0) {
      PyErr_Clear();
      return;
    }
    held_ = true;
    fits_ = view_.itemsize == sizeof(std::int32_t) && view_.format && (*view_.format == 'i' || *view_.format == 'l');
  }
  Int32Buffer(const Int32Buffer&) = delete;
  Int32Buffer& operator=(const Int32Buffer&) = delete;
  ~Int32Buffer() {
    if (held_) PyBuffer_Release(&view_);
  }

  bool has_dimensions(int count) const { return fits_ && view_.ndim == count; }
  std::size_t size(int dimension) const { return static_cast<std::size_t>(view_.shape[dimension]); }
  const std::int32_t* data() const { return static_cast<const std::int32_t*>(view_.buf); }

 private:
  Py_buffer view_{};
  bool held_ = false, fits_ = false;
};

// Holds one integer for each request. An int32 array is read in place; any other array or sequence is copied.
class Numbers {
 public:
  Numbers(nanobind::handle values, const char* name, std::size_t count) : buffer_(values) {
    if (buffer_.has_dimensions(1)) {
      numbers_ = {buffer_.data(), buffer_.size(0)};
    } else {
      copy(values, name);
    }
    if (numbers_.size() != count) {
      refuse(std::string(name) + ": give one integer a request (" + std::to_string(count) + "), got " +
             std::to_string(numbers_.size()));
    }
  }

  // Raises ValueError unless every number is from 0 to `most`; the message names the first that is not.
  void check(const char* name, std::size_t most) const {
    for (const std::int32_t number : numbers_) {
      if (number < 0 || static_cast<std::size_t>(number) > most) {
        refuse(std::string(name) + ": must be from 0 to " + std::to_string(most) + ", got " + std::to_string(number));
      }
    }
  }

  std::span<const std::int32_t> get() const { return numbers_; }

 private:
  void copy(nanobind::handle values, const char* name) {
    const Py_ssize_t size = PySequence_Check(values.ptr()) ? PySequence_Size(values.ptr()) : -1;
    PyErr_Clear();
    if (size < 0) {
      refuse(std::string(name) + ": give an int32 array or a sequence of int, not " +
             nanobind::repr(values.type()).c_str());
    }
    copied_.reserve(size);
    for (Py_ssize_t i = 0; i < size; ++i) {
      const nanobind::object item = nanobind::steal(PySequence_GetItem(values.ptr(), i));
      const auto number = int32_of(item);
      PyErr_Clear();  // the sequence may have raised instead of giving the item
      if (!number) {
        const std::string what = item ? nanobind::repr(item).c_str() : "missing";
        refuse(std::string(name) + "[" + std::to_string(i) + "] is " + what + ": give integers of 32 bits");
      }
      copied_.push_back(*number);
    }
    numbers_ = copied_;
  }

  Int32Buffer buffer_;
  std::vector<std::int32_t> copied_;
  std::span<const std::int32_t> numbers_;
};

}  // namespace agentspec
