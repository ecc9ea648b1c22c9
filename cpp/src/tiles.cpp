#include "detrt/tiles.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <string>

#include "detrt/error.hpp"

namespace detrt {
namespace {

constexpr std::int64_t most_tiles = 10'000; // of an image, the whole image among them
constexpr double same_iou = 0.5, same_smaller = 0.6, edge_part = 0.02, cut_weight = 0.5, sure = 0.5;

using Ends = std::pair<int, int>;

// Number of tiles along a side.
int count_along(int side, int given, double overlap) {
  const int tile = std::min(side, given);
  const int step = std::max(1, static_cast<int>(std::floor(tile * (1 - overlap))));
  return 1 + (side - tile + step - 1) / step;
}

// First and last pixel of each tile along a side; all tiles are equal.
std::vector<Ends> spread(int side, int given, double overlap) {
  const int tile = std::min(side, given), count = count_along(side, given, overlap);
  std::vector<Ends> spans;
  for (int i = 0; i < count; ++i) {
    const double exact = static_cast<double>(static_cast<std::int64_t>(i) * (side - tile)) / std::max(1, count - 1);
    const int start = static_cast<int>(std::nearbyint(exact)); // halves to even, as Python's round
    spans.emplace_back(start, start + tile);
  }
  return spans;
}

// How long an object may be to lie whole in a tile, off its edges; all of a side that has one tile.
double shared_length(int side, int tile, double overlap) {
  const std::vector<Ends> spans = spread(side, tile, overlap);
  if (spans.size() == 1)
    return std::numeric_limits<double>::infinity();
  int widest = 0;
  for (std::size_t i = 1; i < spans.size(); ++i)
    widest = std::max(widest, spans[i].first - spans[i - 1].first);
  return tile - widest - 2 * edge_part * tile;
}

template <class Number> using Corners = std::array<Number, 4>;

template <class Number> Number area_of(const Corners<Number>& box) {
  return std::max(box[2] - box[0], Number{0}) * std::max(box[3] - box[1], Number{0});
}

template <class Number, class Other> Corners<Number> part_in(const Corners<Number>& box, const Corners<Other>& inside) {
  return {std::max(box[0], static_cast<Number>(inside[0])), std::max(box[1], static_cast<Number>(inside[1])),
          std::min(box[2], static_cast<Number>(inside[2])), std::min(box[3], static_cast<Number>(inside[3]))};
}

// IoU, and intersection over the smaller one; 0 of empty ones. The sums are in the type of the boxes, as NumPy's.
template <class Number> std::pair<double, double> overlaps_of(const Corners<Number>& a, const Corners<Number>& b) {
  const Number inner = area_of(part_in(a, b)), first = area_of(a), second = area_of(b);
  const Number either = first + second - inner, smaller = std::min(first, second);
  return {either > 0 ? static_cast<double>(inner / either) : 0, smaller > 0 ? static_cast<double>(inner / smaller) : 0};
}

// A detection of one window.
struct Piece {
  Detection found;           // its box in pixels of the image
  std::size_t window = 0;    // of the windows
  bool cut = false;          // by an edge of the window that is not the image's
  std::vector<const Piece*> members{}; // of the best one of an object: all its pieces
};

// Whether the detection is cut, along x and along y.
std::array<bool, 2> cut_by(const Window& window, const Corners<float>& box, Size image) {
  const std::array<int, 2> start{window.x0, window.y0}, end{window.x1, window.y1}, whole{image.width, image.height};
  std::array<bool, 2> cut{};
  for (std::size_t axis = 0; axis < 2; ++axis) {
    const int side = end[axis] - start[axis];
    cut[axis] = (box[axis] < edge_part * side && start[axis] > 0) || (box[axis + 2] > side - edge_part * side && end[axis] < whole[axis]);
  }
  return cut;
}

Corners<double> shown_in_both(const Window& a, const Window& b) {
  return {static_cast<double>(std::max(a.x0, b.x0)), static_cast<double>(std::max(a.y0, b.y0)),
          static_cast<double>(std::min(a.x1, b.x1)), static_cast<double>(std::min(a.y1, b.y1))};
}

Corners<double> wide(const Corners<float>& box) {
  return {box[0], box[1], box[2], box[3]};
}

bool same_object(const Piece& other, const Piece& piece, const std::vector<Window>& windows) {
  const Corners<double> both = shown_in_both(windows[other.window], windows[piece.window]);
  if (area_of(both) <= 0)
    return false; // the boxes lie in their windows
  const Corners<float>&a = other.found.box_xyxy, &b = piece.found.box_xyxy;
  const auto [iou, smaller] = overlaps_of(a, b);
  if (iou >= same_iou)
    return true;
  if ((area_of(a) <= area_of(b) ? other.cut : piece.cut) && smaller >= same_smaller)
    return true;
  return (other.cut || piece.cut) && overlaps_of(part_in(wide(a), both), part_in(wide(b), both)).first >= same_iou;
}

// Gives the best detection of each object of one class its members. own: in their order in the image.
void find_objects(const std::vector<Piece*>& own, const std::vector<Window>& windows, std::vector<Piece*>& kept) {
  std::vector<std::size_t> order(own.size());
  for (std::size_t i = 0; i < order.size(); ++i)
    order[i] = i;
  const auto rank = [&](std::size_t i) { return static_cast<double>(own[i]->found.score) * (own[i]->cut ? cut_weight : 1.0); };
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return rank(a) > rank(b); });
  std::vector<char> alive(own.size(), 1);
  for (const std::size_t best : order) {
    if (!alive[best])
      continue;
    alive[best] = 0;
    std::vector<const Piece*> pieces{own[best]};
    std::set<std::size_t> taken{own[best]->window};
    for (std::size_t next = 0; next < pieces.size(); ++next) {
      const Piece& piece = *pieces[next];
      std::map<std::size_t, const Piece*> first; // the better one of a window
      for (std::size_t i = 0; i < own.size(); ++i)
        if (alive[i] && taken.count(own[i]->window) == 0 && same_object(*own[i], piece, windows)) {
          alive[i] = 0;
          if (own[i]->found.score < static_cast<float>(sure) * own[best]->found.score)
            continue;
          const Piece*& one = first[own[i]->window];
          if (one == nullptr || own[i]->found.score > one->found.score)
            one = own[i];
        }
      if (piece.cut)
        for (const auto& [window, one] : first) {
          pieces.push_back(one);
          taken.insert(window);
        }
    }
    own[best]->members = std::move(pieces);
    kept.push_back(own[best]);
  }
}

// Run lengths, in the image, of the union of masks of windows.
Runs placed(const std::vector<const Piece*>& pieces, const std::vector<Window>& windows, Size image) {
  Window all = windows[pieces.front()->window];
  for (const Piece* piece : pieces) {
    const Window& window = windows[piece->window];
    all = {std::min(all.y0, window.y0), std::min(all.x0, window.x0), std::max(all.y1, window.y1), std::max(all.x1, window.x1)};
  }
  const auto tall = static_cast<std::size_t>(all.y1 - all.y0);
  std::vector<char> pixels(tall * static_cast<std::size_t>(all.x1 - all.x0)); // column by column
  for (const Piece* piece : pieces) {
    const Window& window = windows[piece->window];
    const std::int64_t height = window.y1 - window.y0;
    const Runs& runs = *piece->found.mask;
    std::int64_t at = 0;
    for (std::size_t i = 0; i < runs.size(); ++i)
      for (const std::int64_t end = at + runs[i]; at < end; ++at)
        if (i % 2 == 1)
          pixels[static_cast<std::size_t>(at / height + window.x0 - all.x0) * tall +
                 static_cast<std::size_t>(at % height + window.y0 - all.y0)] = 1;
  }
  Runs runs;
  std::int64_t length = 0;
  bool inside = false;
  const auto add = [&](std::int64_t count, bool object) {
    if (object != inside) {
      runs.push_back(length);
      length = 0;
      inside = object;
    }
    length += count;
  };
  const auto zeros = [&](std::int64_t count) {
    if (count > 0)
      add(count, false);
  };
  zeros(static_cast<std::int64_t>(all.x0) * image.height);
  for (int x = all.x0; x < all.x1; ++x) {
    zeros(all.y0);
    for (std::size_t y = 0; y < tall; ++y)
      add(1, pixels[static_cast<std::size_t>(x - all.x0) * tall + y] != 0);
    zeros(image.height - all.y1);
  }
  zeros(static_cast<std::int64_t>(image.width - all.x1) * image.height);
  runs.push_back(length);
  return runs;
}

} // namespace

void check_tiling(const Tiling& tiling) {
  if (tiling.size.height < 1 || tiling.size.width < 1)
    throw Error(ErrorKind::usage, "tiles must be of at least 1x1 pixels; got " + std::to_string(tiling.size.height) + "x" +
                                      std::to_string(tiling.size.width));
  if (!(tiling.overlap >= 0 && tiling.overlap <= 0.9))
    throw Error(ErrorKind::usage,
                "overlap is the part of a tile's side that neighbours share, from 0 to 0.9; got " + std::to_string(tiling.overlap));
}

std::vector<Window> windows_of(const Tiling& tiling, Size image) {
  const std::int64_t count = 1 + static_cast<std::int64_t>(count_along(image.height, tiling.size.height, tiling.overlap)) *
                                     count_along(image.width, tiling.size.width, tiling.overlap);
  if (count > most_tiles) {
    const auto text = [](Size size) { return std::to_string(size.height) + "x" + std::to_string(size.width); };
    throw Error(ErrorKind::session, "an image of " + text(image) + " pixels would be " + std::to_string(count) + " tiles of " +
                                        text(tiling.size) + ", and at most " + std::to_string(most_tiles) +
                                        " are taken; give larger tiles, or a smaller overlap");
  }
  std::vector<Window> windows;
  for (const auto& [y0, y1] : spread(image.height, tiling.size.height, tiling.overlap))
    for (const auto& [x0, x1] : spread(image.width, tiling.size.width, tiling.overlap))
      windows.push_back({y0, x0, y1, x1});
  const Window whole{0, 0, image.height, image.width};
  if (windows.size() != 1 || !(windows.front() == whole))
    windows.push_back(whole);
  return windows;
}

Detections merge_tiles(std::vector<std::pair<Window, Detections>> parts, const Tiling& tiling, Size image) {
  if (parts.size() == 1)
    return std::move(parts.front().second);
  const std::array<double, 2> shared{shared_length(image.width, tiling.size.width, tiling.overlap),
                                     shared_length(image.height, tiling.size.height, tiling.overlap)};
  std::vector<Window> windows;
  std::vector<Piece> pieces;
  for (auto& [window, detections] : parts) {
    const bool whole = windows.size() + 1 == parts.size();
    for (Detection& one : detections.found) {
      Corners<float>& box = one.box_xyxy;
      const std::array<bool, 2> cut = cut_by(window, box, image);
      const std::array<bool, 2> longer{box[2] - box[0] > shared[0], box[3] - box[1] > shared[1]};
      if (whole ? !(longer[0] || longer[1]) : (cut[0] && !longer[0]) || (cut[1] && !longer[1]))
        continue;
      for (std::size_t i = 0; i < 4; ++i)
        box[i] += static_cast<float>(i % 2 == 0 ? window.x0 : window.y0);
      pieces.push_back({std::move(one), windows.size(), cut[0] || cut[1]});
    }
    windows.push_back(window);
  }
  std::map<std::int64_t, std::vector<Piece*>> classes;
  for (Piece& piece : pieces)
    classes[piece.found.class_id].push_back(&piece);
  std::vector<Piece*> kept;
  for (const auto& [id, own] : classes)
    find_objects(own, windows, kept);
  std::sort(kept.begin(), kept.end(), [](const Piece* a, const Piece* b) {
    return a->found.score != b->found.score ? a->found.score > b->found.score : a < b;
  });
  Detections merged{image, {}, std::move(parts.front().second.prompt)};
  for (const Piece* best : kept) {
    Detection one = best->found;
    for (const Piece* piece : best->members)
      for (std::size_t i = 0; i < 2; ++i) {
        one.box_xyxy[i] = std::min(one.box_xyxy[i], piece->found.box_xyxy[i]);
        one.box_xyxy[i + 2] = std::max(one.box_xyxy[i + 2], piece->found.box_xyxy[i + 2]);
      }
    if (one.mask)
      one.mask = placed(best->members, windows, image);
    merged.found.push_back(std::move(one));
  }
  return merged;
}

} // namespace detrt
