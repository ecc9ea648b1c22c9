"use strict";
// The page of `detrt serve`: one image to /v1/detect, for one model or two side by side, its masks and boxes over it; or the frames of a
// webcam, one after the other. Texts of models and files go through textContent only.
const FLOOR = 0.05; // the server is asked once with this threshold; the sliders then hide and show
const OVERLAP = 0.2; // the server's own, for the outlines of the tiles
const FRAME_SIDE = 1280; // of a webcam, in pixels, and the pause after each answer in ms
const PAUSE_MS = 30;
const $ = (id) => document.getElementById(id);
const views = [...document.querySelectorAll(".view")].map((figure) => ({
  figure, frame: figure.querySelector(".frame"), image: figure.querySelector(".image"), masks: figure.querySelector(".masks"),
  tiles: figure.querySelector(".tiles"), boxes: figure.querySelector(".boxes"), caption: figure.querySelector("figcaption"),
}));
// answers: of the models of both views; told: those that the JSON shows. own: thresholds of classes that were moved. camera: the stream of a webcam.
const state = { models: [], file: null, answers: [], told: null, running: null, own: new Map(), camera: null };

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function hue(label) {
  let hash = 0;
  for (const letter of label) hash = (hash * 31 + letter.codePointAt(0)) >>> 0;
  return (hash * 137) % 360;
}

function colour(label) {
  return `hsl(${hue(label)} 72% 46%)`;
}

// Of letters on that colour: from orange to blue-green white has too little contrast.
function ink(label) {
  return hue(label) > 20 && hue(label) < 200 ? "#000" : "#fff";
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
  const response = await fetch(address, { ...options, headers: headers() }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("The server does not answer; check that it runs.");
  });
  const data = await response.json().catch((error) => {
    if (error.name === "AbortError") throw error;
    return null; // a page of a proxy
  });
  if (response.ok && data) return data;
  if (response.status === 401) $("lock").hidden = false;
  const wait = response.headers.get("Retry-After");
  throw new Error((data?.error?.message ?? `The server's answer is no JSON, status ${response.status}.`) + (wait ? ` (in ${wait} s)` : ""));
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
function drawMasks(canvas, width, height, shown) {
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
  const options = () => state.models.map((model) => element("option", { value: model.name, textContent: model.name }));
  for (const [id, first] of [["model", []], ["beside", [element("option", { value: "", textContent: "no other model" })]]]) {
    const chosen = $(id).value;
    $(id).replaceChildren(...first, ...options());
    if (state.models.some((model) => model.name === chosen)) $(id).value = chosen;
  }
  $("compare").hidden = state.models.length < 2;
  fail("");
  showModel();
}

function chosenModels() {
  return [$("model").value, $("beside").value].map((name) => state.models.find((model) => model.name === name)).filter(Boolean);
}

function showModel() {
  const models = chosenModels();
  if (!models.length) return;
  $("ask").hidden = !models.some((model) => model.takes_prompt);
  $("show").hidden = !models.some((model) => model.takes_query_images);
  views[1].figure.hidden = models.length < 2;
  const words = models.map((model) => {
    const what = model.takes_prompt ? "takes a prompt" : `${model.classes.length} classes`;
    return `${model.name} · ${what} · ${model.input.height}×${model.input.width} · ${model.backend}`;
  });
  $("about").textContent = words.join("   |   ");
}

function showImage(file) {
  const address = URL.createObjectURL(file);
  URL.revokeObjectURL(views[0].image.src);
  for (const view of views) view.image.src = address;
  $("drop").hidden = true;
  $("file").tabIndex = -1; // its label is gone; the button beside Detect opens it
  $("views").hidden = false;
  $("again").disabled = $("other").disabled = false;
}

function take(file) {
  if (!file) return;
  stopCamera();
  state.file = file;
  state.answers = [];
  showImage(file);
  detect();
  draw();
}

function formFor(model, query) {
  const form = new FormData();
  form.append("images", state.file, state.file.name || "pasted");
  form.append("model", model.name);
  form.append("threshold", FLOOR);
  if ($("tile").value) form.append("tile", $("tile").value);
  if (query && model.takes_query_images) form.append("query_images", query, query.name);
  else if (model.takes_prompt) form.append("prompt", $("prompt").value);
  return form;
}

async function ask(model, query, signal) {
  const start = performance.now();
  const answer = await fetchJson("v1/detect", { method: "POST", body: formFor(model, query), signal });
  return { ...answer, tile: Number($("tile").value), seen_ms: performance.now() - start };
}

// Asks all chosen models; whether all answered.
async function detect() {
  const models = chosenModels();
  if (!state.file || !models.length) return false;
  // Also where nothing is asked below: an answer to what was asked before would be shown with what is chosen now.
  if (state.running) state.running.abort();
  state.running = null;
  document.body.classList.remove("busy");
  const query = $("query").files[0];
  if (models.some((model) => model.takes_prompt && !(query && model.takes_query_images)) && !$("prompt").value.trim()) {
    fail("Say what to find: this model needs a prompt.");
    $("prompt").focus();
    return false;
  }
  const running = (state.running = new AbortController());
  document.body.classList.add("busy");
  try {
    state.answers = await Promise.all(models.map((model) => ask(model, query, running.signal)));
    fail("");
  } catch (error) {
    if (error.name === "AbortError") return false;
    running.abort(); // the other model's
    state.answers = [];
    fail(error.message);
  }
  if (state.running !== running) return false;
  state.running = null;
  document.body.classList.remove("busy");
  if (!state.camera) draw(); // a frame of a webcam is shown with its boxes
  return state.answers.length > 0;
}

// The webcam: a frame is sent when the answer to the one before has come, and is shown with it.
async function startCamera() {
  if (!navigator.mediaDevices) {
    fail("Browsers give a webcam only to a page over https or of localhost; open this page in one of these ways.");
    return;
  }
  const video = element("video", { muted: true, playsInline: true });
  let stream;
  $("webcam").disabled = true; // a second click would open the webcam again
  try {
    stream = await navigator.mediaDevices.getUserMedia({ video: { width: { ideal: FRAME_SIDE } } });
    state.camera = video.srcObject = stream;
    await video.play();
  } catch (error) {
    stopCamera();
    fail(`The webcam cannot be used: ${error.message}`);
    return;
  } finally {
    $("webcam").disabled = false;
  }
  $("webcam").textContent = "Stop";
  document.body.classList.add("camera");
  stream.getVideoTracks()[0].addEventListener("ended", stopCamera); // unplugged
  const canvas = element("canvas");
  while (state.camera === stream) {
    const scale = Math.min(1, FRAME_SIDE / Math.max(video.videoWidth, video.videoHeight));
    canvas.width = Math.round(video.videoWidth * scale);
    canvas.height = Math.round(video.videoHeight * scale);
    canvas.getContext("2d").drawImage(video, 0, 0, canvas.width, canvas.height);
    const frame = await new Promise((done) => canvas.toBlob(done, "image/jpeg", 0.9));
    if (state.camera !== stream) break;
    state.file = new File([frame], "webcam.jpg", { type: "image/jpeg" });
    const answered = await detect();
    if (state.camera !== stream) break;
    if (answered) {
      showImage(state.file);
      draw();
    } else if (!state.running) {
      stopCamera(); // what is wrong is said, and would be wrong with the next frame
    }
    await new Promise((done) => setTimeout(done, PAUSE_MS));
  }
}

function stopCamera() {
  if (!state.camera) return;
  for (const track of state.camera.getTracks()) track.stop();
  state.camera = null;
  $("webcam").textContent = "Webcam";
  document.body.classList.remove("camera");
}

function thresholdOf(label) {
  return state.own.get(label) ?? Number($("threshold").value);
}

// A slider for each class that was found; one that was moved keeps its value, the others follow the slider above.
function drawSliders() {
  const labels = new Set([...state.own.keys(), ...state.answers.flatMap((answer) => answer.images[0].detections.map((found) => found.label))]);
  $("classes").hidden = labels.size < 2;
  const known = new Map([...$("sliders").children].map((row) => [row.dataset.label, row]));
  const rows = [...labels].sort().map((label) => {
    const row = known.get(label) ?? sliderOf(label);
    row.querySelector("input").value = thresholdOf(label);
    row.querySelector("output").textContent = thresholdOf(label).toFixed(2);
    return row;
  });
  if (rows.length !== known.size || rows.some((row, index) => row !== $("sliders").children[index])) $("sliders").replaceChildren(...rows);
}

function sliderOf(label) {
  const { min, max, step } = $("threshold");
  const slider = element("input", { type: "range", min, max, step });
  slider.addEventListener("input", () => {
    state.own.set(label, Number(slider.value));
    draw();
  });
  const row = element("label", {}, element("span", {}, element("span", { textContent: label }), element("output")), slider);
  row.dataset.label = label;
  return row;
}

function draw() {
  const answer = state.answers[0];
  $("found").replaceChildren();
  $("times").hidden = !answer;
  if (state.told !== state.answers) drawJson();
  $("total").textContent = "";
  drawSliders();
  const shown = views.map((view, index) => drawView(view, state.answers[index], index === 0));
  if (!answer) {
    $("count").textContent = state.running ? "…" : state.file ? "No answer" : "No image yet";
    return;
  }
  $("count").textContent = counted(shown[0]);
  $("total").textContent = `${answer.seen_ms.toFixed(0)} ms`;
  drawTimes(answer);
}

// The answers as the server gave them, once: the sliders change nothing of them, and masks are long.
function drawJson() {
  const told = state.answers.map(({ model, time_ms, images }) => ({ model, time_ms, images }));
  $("json").textContent = told.length ? JSON.stringify(told.length > 1 ? told : told[0], null, 1) : "";
  state.told = state.answers;
}

function counted(number) {
  return number === 1 ? "1 object" : `${number} objects`;
}

// Masks, boxes and tiles of an answer over its image, and the list of the first view. How many are shown.
function drawView(view, answer, listed) {
  view.boxes.replaceChildren();
  view.tiles.replaceChildren();
  view.caption.textContent = "";
  drawMasks(view.masks, 1, 1, []);
  if (!answer) return 0;
  const { width, height, detections } = answer.images[0];
  const shown = detections.filter((found) => found.score > thresholdOf(found.label));
  drawMasks(view.masks, width, height, shown);
  drawTiles(view.tiles, answer.tile, width, height);
  if (state.answers.length > 1) view.caption.textContent = `${answer.model}: ${counted(shown.length)}, ${answer.seen_ms.toFixed(0)} ms`;
  for (const found of shown) {
    const [x0, y0, x1, y1] = found.box_xyxy;
    const paint = colour(found.label);
    const tag = element("span", { textContent: `${found.label} ${found.score.toFixed(2)}` });
    tag.style.background = paint;
    tag.style.color = ink(found.label);
    const box = element("div", { className: "box" }, tag);
    box.classList.toggle("low", y0 / height < 0.05);
    box.classList.toggle("far", (x0 + x1) / 2 > 0.7 * width);
    box.style.borderColor = paint;
    place(box, x0, y0, x1, y1, width, height);
    view.boxes.append(box);
    if (!listed) continue;
    const mark = element("b");
    mark.style.background = paint;
    const name = element("span", { textContent: found.label, title: found.label });
    const row = element("li", { tabIndex: 0 }, mark, name, element("em", { textContent: found.score.toFixed(3) }));
    const light = (on) => {
      for (const other of view.boxes.children) other.classList.toggle("dim", on && other !== box);
      box.classList.toggle("lit", on);
    };
    for (const event of ["mouseenter", "focus"]) row.addEventListener(event, () => light(true));
    for (const event of ["mouseleave", "blur"]) row.addEventListener(event, () => light(false));
    $("found").append(row);
  }
  return shown.length;
}

function place(box, x0, y0, x1, y1, width, height) {
  box.style.left = `${(100 * x0) / width}%`;
  box.style.top = `${(100 * y0) / height}%`;
  box.style.width = `${(100 * (x1 - x0)) / width}%`;
  box.style.height = `${(100 * (y1 - y0)) / height}%`;
}

// The tiles, all equal and spread evenly, as the server cuts them.
function drawTiles(layer, tile, width, height) {
  if (!tile) return;
  const spread = (side) => {
    const size = Math.min(side, tile);
    const last = Math.ceil((side - size) / Math.max(1, Math.floor(size * (1 - OVERLAP))));
    return Array.from({ length: last + 1 }, (_, i) => (i * (side - size)) / Math.max(1, last));
  };
  for (const y of spread(height)) {
    for (const x of spread(width)) {
      const outline = element("i");
      place(outline, x, y, x + Math.min(tile, width), y + Math.min(tile, height), width, height);
      layer.append(outline);
    }
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
for (const view of views) {
  view.image.addEventListener("load", () => {
    const { naturalWidth: width, naturalHeight: height } = view.image;
    const most = Math.max(240, window.innerHeight - 136);
    view.frame.style.width = `${Math.min(2 * width, (most * width) / height)}px`;
  });
}
$("file").addEventListener("change", (event) => {
  take(event.target.files[0]);
  event.target.value = "";
});
$("other").addEventListener("click", () => $("file").click());
for (const id of ["model", "beside"]) {
  $(id).addEventListener("change", () => {
    state.answers = []; // boxes, times, JSON and classes of the other model
    state.own.clear();
    showModel();
    detect();
    draw();
  });
}
$("tile").addEventListener("change", detect);
$("webcam").addEventListener("click", () => (state.camera ? stopCamera() : startCamera()));
$("reset").addEventListener("click", () => {
  state.own.clear();
  draw();
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
$("copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText($("json").textContent);
    $("copy").textContent = "Copied";
    setTimeout(() => ($("copy").textContent = "Copy"), 1500);
  } catch {
    getSelection().selectAllChildren($("json")); // browsers give the clipboard only to pages over https or of localhost
  }
});
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
