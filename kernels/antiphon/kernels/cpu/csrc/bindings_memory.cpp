// Memory in huge pages, for what is read from end to end in every step.

#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <new>

#include "bindings.h"

namespace {

constexpr size_t HUGE_PAGE = size_t{2} << 20;
constexpr size_t LINE = 64;

size_t rounded_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

// Zeros on whole huge pages, as far as the kernel has them; freed with the last reference.
class Mapping {
  public:
    explicit Mapping(size_t size) : size_(rounded_up(size, HUGE_PAGE) + HUGE_PAGE) {
        start_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (start_ == MAP_FAILED) throw std::bad_alloc();
        next_ = rounded_up(reinterpret_cast<size_t>(start_), HUGE_PAGE);
        madvise(reinterpret_cast<void *>(next_), size_ - HUGE_PAGE, MADV_HUGEPAGE);
    }
    Mapping(const Mapping &) = delete;
    Mapping &operator=(const Mapping &) = delete;
    ~Mapping() { munmap(start_, size_); }

    // A piece on a cache line, or null if there is no room for it.
    void *take(size_t size) {
        const size_t taken = next_;
        if (taken + size > reinterpret_cast<size_t>(start_) + size_) return nullptr;
        next_ = rounded_up(taken + size, LINE);
        return reinterpret_cast<void *>(taken);
    }

  private:
    size_t size_;
    void *start_;
    size_t next_;
};

// Small pieces share mappings: a page of their own each would be half empty. What of the last one
// is never taken is never touched, and so costs nothing.
at::Tensor zeros(int64_t size) {
    constexpr size_t SHARED = size_t{32} << 20;
    static std::weak_ptr<Mapping> latest;
    TORCH_CHECK(size > 0, "a piece of memory has a size");
    std::shared_ptr<Mapping> mapping = latest.lock();
    void *piece = mapping ? mapping->take(size) : nullptr;
    if (piece == nullptr) {
        mapping = std::make_shared<Mapping>(std::max(static_cast<size_t>(size), SHARED));
        piece = mapping->take(size);
        latest = mapping;
    }
    return at::from_blob(piece, {size}, [mapping](void *) {}, at::kByte);
}

}  // namespace

void bind_memory(py::module_ &module) {
    module.def("zeros", zeros, "So many bytes of zeros, in huge pages where there are any.");
}
