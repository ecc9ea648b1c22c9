"use strict";
// The page of `detrt serve`: one image to /v1/detect, its masks and boxes over it. Texts of models and files go through textContent only.
const FLOOR = 0.05; // the server is asked once with this threshold; the slider then hides and shows
const $ = (id) => document.getElementById(id);
const state = { models: [], file: null, answer: null, running: null };

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function colour(label) {
  let hash = 0;
  for (const letter of label) hash = (hash * 31 + letter.codePointAt(0)) >>> 0;
  return `hsl(${(hash * 137) % 360} 72% 46%)`;
}

function headers() {
  const key = $("key").value;
  return key ? { "X-API-Key": key } : {};
}

function fail(text) {
  $("error").hidden = !text;
  $("error").textContent = text || "";
}

async function fetchJson(address, options = {}) {
  const response = await fetch(address, { ...options, headers: headers() });
  const data = await response.json();
  if (response.ok) return data;
  if (response.status === 401) $("lock").hidden = false;
  const wait = response.headers.get("Retry-After");
  throw new Error(data.error.message + (wait ? ` (in ${wait} s)` : ""));
}

// Runs of zeros and ones in turn, column by column, from COCO's text: five bits per letter, differences to the run but one before.
function runs(text) {
  const counts = [];
  for (let i = 0; i < text.length; ) {
    let value = 0, shift = 0, bits;
    do {
      bits = text.charCodeAt(i++) - 48;
      value |= (bits & 31) << shift;
      shift += 5;
    } while (bits & 32);
    if (bits & 16) value |= -1 << shift;
    counts.push(counts.length > 2 ? value + counts[counts.length - 2] : value);
  }
  return counts;
}

// The masks of the detections shown, at most this many pixels wide and high: the browser scales them with the image.
const MASK_SIDE = 4096;
function drawMasks(width, height, shown) {
  const canvas = $("masks");
  const scale = Math.min(1, MASK_SIDE / Math.max(width, height));
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  const pen = canvas.getContext("2d");
  for (const found of [...shown].reverse()) {
    if (!found.segmentation) continue;
    pen.fillStyle = colour(found.label);
    let at = 0;
    const path = new Path2D();
    runs(found.segmentation.counts).forEach((count, index) => {
      for (let rest = index % 2 ? count : 0, from = at; rest > 0; ) {
        const x = Math.floor(from / height), y = from % height, part = Math.min(rest, height - y);
        path.rect(x * scale, y * scale, scale, part * scale);
        rest -= part;
        from += part;
      }
      at += count;
    });
    pen.fill(path);
  }
}

async function loadModels() {
  try {
    state.models = (await fetchJson("v1/models")).models;
  } catch (error) {
    $("about").textContent = error.message;
    if ($("lock").hidden) setTimeout(loadModels, 1500); // the models are still being loaded
    return;
  }
  const chosen = $("model").value;
  $("model").replaceChildren(...state.models.map((model) => element("option", { value: model.name, textContent: model.name })));
  if (state.models.some((model) => model.name === chosen)) $("model").value = chosen;
  fail("");
  showModel();
}

function currentModel() {
  return state.models.find((model) => model.name === $("model").value);
}

function showModel() {
  const model = currentModel();
  if (!model) return;
  $("ask").hidden = !model.takes_prompt;
  $("show").hidden = !model.takes_query_images;
  const what = model.takes_prompt ? "takes a prompt" : `${model.classes.length} classes`;
  $("about").textContent = `${model.name} · ${what} · ${model.input.height}×${model.input.width} · ${model.backend}`;
}

function take(file) {
  if (!file) return;
  state.file = file;
  state.answer = null;
  URL.revokeObjectURL($("image").src);
  $("image").src = URL.createObjectURL(file);
  $("drop").hidden = true;
  $("view").hidden = false;
  $("again").disabled = $("other").disabled = false;
  draw();
  detect();
}

async function detect() {
  const model = currentModel();
  if (!state.file || !model) return;
  const query = model.takes_query_images ? $("query").files[0] : null;
  if (model.takes_prompt && !query && !$("prompt").value.trim()) {
    fail("Say what to find: this model needs a prompt.");
    $("prompt").focus();
    return;
  }
  if (state.running) state.running.abort();
  const running = (state.running = new AbortController());
  const form = new FormData();
  form.append("images", state.file, state.file.name || "pasted");
  form.append("model", model.name);
  form.append("threshold", FLOOR);
  if (query) form.append("query_images", query, query.name);
  else if (model.takes_prompt) form.append("prompt", $("prompt").value);
  document.body.classList.add("busy");
  const start = performance.now();
  try {
    const answer = await fetchJson("v1/detect", { method: "POST", body: form, signal: running.signal });
    state.answer = { ...answer, seen_ms: performance.now() - start };
    fail("");
  } catch (error) {
    if (error.name === "AbortError") return;
    state.answer = null;
    fail(error.message);
  }
  if (state.running === running) {
    state.running = null;
    document.body.classList.remove("busy");
    draw();
  }
}

function draw() {
  const answer = state.answer;
  $("boxes").replaceChildren();
  drawMasks(1, 1, []);
  $("found").replaceChildren();
  $("times").hidden = !answer;
  $("json").textContent = answer ? JSON.stringify({ model: answer.model, time_ms: answer.time_ms, images: answer.images }, null, 1) : "";
  $("total").textContent = "";
  if (!answer) {
    $("count").textContent = state.file ? "…" : "No image yet";
    return;
  }
  const { width, height, detections } = answer.images[0];
  const shown = detections.filter((found) => found.score > Number($("threshold").value));
  $("count").textContent = shown.length === 1 ? "1 object" : `${shown.length} objects`;
  $("total").textContent = `${answer.seen_ms.toFixed(0)} ms`;
  drawTimes(answer);
  drawMasks(width, height, shown);
  for (const found of shown) {
    const [x0, y0, x1, y1] = found.box_xyxy;
    const paint = colour(found.label);
    const tag = element("span", { textContent: `${found.label} ${found.score.toFixed(2)}` });
    tag.style.background = paint;
    const box = element("div", { className: y0 / height < 0.05 ? "box low" : "box" }, tag);
    box.style.borderColor = paint;
    box.style.left = `${(100 * x0) / width}%`;
    box.style.top = `${(100 * y0) / height}%`;
    box.style.width = `${(100 * (x1 - x0)) / width}%`;
    box.style.height = `${(100 * (y1 - y0)) / height}%`;
    const mark = element("b");
    mark.style.background = paint;
    const name = element("span", { textContent: found.label, title: found.label });
    const row = element("li", { tabIndex: 0 }, mark, name, element("em", { textContent: found.score.toFixed(3) }));
    const light = (on) => {
      for (const other of $("boxes").children) other.classList.toggle("dim", on && other !== box);
      box.classList.toggle("lit", on);
    };
    for (const event of ["mouseenter", "focus"]) row.addEventListener(event, () => light(true));
    for (const event of ["mouseleave", "blur"]) row.addEventListener(event, () => light(false));
    $("boxes").append(box);
    $("found").append(row);
  }
}

function drawTimes(answer) {
  const { queue, decode, model } = answer.time_ms;
  const parts = { queue, decode, run: model, rest: Math.max(0, answer.seen_ms - queue - decode - model) };
  const names = { queue: "waiting", decode: "decoding", run: "model", rest: "all else" };
  $("legend").replaceChildren();
  for (const [kind, time] of Object.entries(parts)) {
    $("bar").querySelector(`.${kind}`).style.flex = String(time);
    $("legend").append(
      element("dt", { className: kind, textContent: names[kind] }),
      element("dd", { textContent: `${time.toFixed(1)} ms` }),
    );
  }
}

// A small image is shown up to twice its size, and none higher than the window.
$("image").addEventListener("load", () => {
  const { naturalWidth: width, naturalHeight: height } = $("image");
  const most = Math.max(240, window.innerHeight - 136);
  $("frame").style.width = `${Math.min(2 * width, (most * width) / height)}px`;
});
$("file").addEventListener("change", (event) => {
  take(event.target.files[0]);
  event.target.value = "";
});
$("other").addEventListener("click", () => $("file").click());
$("model").addEventListener("change", () => {
  state.answer = null; // boxes, times and JSON of the other model
  draw();
  showModel();
  detect();
});
$("options").addEventListener("submit", (event) => {
  event.preventDefault();
  detect();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    detect();
  }
});
// A prompt or an image says what to find, the one that was given last.
$("prompt").addEventListener("input", () => ($("query").value = ""));
$("query").addEventListener("change", () => {
  if ($("query").files.length) $("prompt").value = "";
  detect();
});
$("threshold").addEventListener("input", () => {
  $("level").textContent = Number($("threshold").value).toFixed(2);
  draw();
});
$("key").addEventListener("change", loadModels);
$("copy").addEventListener("click", () => navigator.clipboard.writeText($("json").textContent));
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    $("stage").classList.toggle("over", kind === "dragover");
    if (kind === "drop") take(event.dataTransfer.files[0]);
  });
}
document.addEventListener("paste", (event) => {
  take([...event.clipboardData.files].find((file) => file.type.startsWith("image/")));
});
loadModels();
