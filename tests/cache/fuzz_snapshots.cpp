// Loads mutated snapshots, their checksums made right again, and uses what was loaded: fuzz_snapshots FILE ROUNDS SEED
//
// A mutated file must be refused with an error, or give a cache that can be used: no crash, no large allocation. It does
// what tests/cache/mutations.py does, many times as fast and under a sanitizer; scripts/fuzz_snapshots.sh builds it. FILE
// is a snapshot of a cache with vocab_size=1000 that was saved with identity="fuzz".
#include <sys/resource.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cache/cache.hpp"
#include "storage/snapshot.hpp"

using namespace agentspec;

namespace {

constexpr std::size_t kHeader = 64, kSizeAt = 16, kContentsAt = 24, kSumAt = 56;
constexpr std::int64_t kVocabulary = 1000;

std::vector<char> read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::uint64_t sum_of(const char* data, std::size_t bytes) {
  Checksum checksum;
  checksum.add(data, bytes);
  return checksum.value();
}

// Makes size and checksums those of the contents.
void seal(std::vector<char>& file) {
  file.resize(std::max(kHeader, file.size() / 8 * 8));
  const std::uint64_t size = file.size(), contents = sum_of(file.data() + kHeader, size - kHeader);
  std::memcpy(file.data() + kSizeAt, &size, 8);
  std::memcpy(file.data() + kContentsAt, &contents, 8);
  const std::uint64_t sum = sum_of(file.data(), kSumAt);
  std::memcpy(file.data() + kSumAt, &sum, 8);
}

// Changes a few places: bits, bytes, whole numbers of 4 or 8 bytes, runs of words that are cut out, repeated or moved.
void mutate(std::vector<char>& file, std::mt19937_64& random) {
  const auto below = [&](std::uint64_t n) { return random() % std::max<std::uint64_t>(n, 1); };
  for (std::uint64_t left = 1 + below(4); left > 0 && file.size() > kHeader + 8; --left) {
    const std::size_t words = (file.size() - kHeader) / 8, at = kHeader + 8 * below(words);
    std::uint64_t word;
    std::memcpy(&word, file.data() + at, 8);
    switch (below(10)) {
      case 0: word ^= std::uint64_t{1} << below(64); break;
      case 1: word += below(2) ? 1 : -1; break;
      case 2: word = below(300); break;
      case 3: word = std::uint64_t{1} << below(64); break;
      case 4: word = ~std::uint64_t{0} >> below(64); break;
      case 5: word = (word & 0xFFFFFFFFu) | below(300) << 32; break;
      case 6: word = (word & ~std::uint64_t{0xFFFFFFFFu}) | below(300); break;
      case 7: std::memcpy(&word, file.data() + kHeader + 8 * below(words), 8); break;
      case 8: {
        const std::size_t count = 8 * (1 + below(std::min<std::size_t>(16, (file.size() - at) / 8)));
        file.erase(file.begin() + static_cast<std::ptrdiff_t>(at), file.begin() + static_cast<std::ptrdiff_t>(at + count));
        continue;
      }
      default: {
        const std::vector<char> piece(file.begin() + static_cast<std::ptrdiff_t>(at),
                                      file.begin() + static_cast<std::ptrdiff_t>(at + 8 * (1 + below(std::min<std::size_t>(16, (file.size() - at) / 8)))));
        file.insert(file.begin() + static_cast<std::ptrdiff_t>(kHeader + 8 * below(words)), piece.begin(), piece.end());
        continue;
      }
    }
    std::memcpy(file.data() + at, &word, 8);
  }
}

// Runs requests of the sessions and groups that the file was made with, evicts, erases and saves.
void use(Cache& cache, std::mt19937_64& random, const std::string& path, bool save) {
  const std::string tenant = "t";
  for (int number = 0; number < 3; ++number) {
    const std::string session = "1:ts" + std::to_string(random() % 3), group = "1:tg";
    const Names names{.session = &session, .group = random() % 2 ? &group : nullptr, .tenant = &tenant,
                      .shared = random() % 4 != 0};
    std::vector<Token> prompt(random() % 40);
    const auto first = static_cast<Token>(random() % 30);
    for (std::size_t i = 0; i < prompt.size(); ++i) prompt[i] = (first + static_cast<Token>(i)) % 30;
    cache.start(0, prompt, names, {}, {}, {});
    const std::vector<std::int32_t> slots{0}, max_draft{16};
    for (int step = 0; step < 3; ++step) {
      const Drafts drafts = cache.propose(slots, max_draft, 0.01, 1.0);
      for (const Token token : drafts.tokens) {
        if (token < 0 || token >= kVocabulary) throw std::logic_error("a draft has an illegal token");
      }
      std::vector<Token> verified(drafts.tokens.begin(), drafts.tokens.begin() + static_cast<std::ptrdiff_t>(drafts.tokens.size() / 2));
      verified.push_back(static_cast<Token>(random() % 30));
      cache.extend(0, verified);
    }
    cache.finish(0, {}, random() % 3);
  }
  const std::string session = "1:ts1";
  if (random() % 2) cache.remove_session(session, tenant);
  cache.resize({{random() % 200 + 1, 0}, {}, {}});
  for (int i = 0; i < 4; ++i) cache.catch_up(WorkBudget(500, 1.0));
  if (save) cache.save(path, "fuzz", "");
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) return std::cerr << "fuzz_snapshots FILE ROUNDS SEED\n", 2;
  const std::string seed_file = arguments[1], path = seed_file + ".mutated" + arguments[3];
  const std::vector<char> whole = read(seed_file);
  const std::uint64_t rounds = std::strtoull(arguments[2], nullptr, 10);
  std::mt19937_64 random(std::strtoull(arguments[3], nullptr, 10));
  Stopwatch::watched = false;
  std::uint64_t loaded = 0, refused = 0;
  for (std::uint64_t round = 0; round < rounds; ++round) {
    auto file = whole;
    if (round > 0) mutate(file, random);
    seal(file);
    std::FILE* const out = std::fopen(path.c_str(), "w");
    if (!out || std::fwrite(file.data(), 1, file.size(), out) != file.size()) return std::perror(path.c_str()), 2;
    std::fclose(out);
    Cache cache({}, {{0, std::size_t{1} << 30}, {}, {}}, kVocabulary);
    try {
      cache.load(path, "fuzz");
    } catch (const std::runtime_error& error) {
      if (round == 0) return std::cerr << error.what() << '\n', 1;
      ++refused;
      continue;
    } catch (const std::bad_alloc&) {
      ++refused;
      continue;
    }
    ++loaded;
    use(cache, random, path, round % 64 == 0);
    if (cache.stats().bytes != cache.recount().bytes) return std::cerr << "sums differ\n", 1;
  }
  std::remove(path.c_str());
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  std::cout << rounds << " files: " << loaded << " loaded, " << refused << " refused, " << usage.ru_maxrss / 1024
            << " MB at most\n";
}
