"use strict";
// Tables that are sorted by a click on a column, and attention that follows the pointer.

for (const table of document.querySelectorAll("table")) {
  table.querySelectorAll("th").forEach((head, column) => head.addEventListener("click", () => sort(table, head, column)));
}

function sort(table, head, column) {
  const up = head.getAttribute("aria-sort") === "descending" ? 1 : -1;
  const body = table.tBodies[0];
  const value = (row) => row.cells[column].textContent;
  const number = (row) => (["-", "None"].includes(value(row)) ? -Infinity : parseFloat(value(row)));
  const isNumeric = [...body.rows].every((row) => !isNaN(number(row)));
  const compare = (a, b) => (a === b ? 0 : a - b);
  const order = (a, b) => (isNumeric ? compare(number(a), number(b)) : value(a).localeCompare(value(b)));
  body.append(...[...body.rows].sort((a, b) => up * order(a, b)));
  table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", up > 0 ? "ascending" : "descending");
}

const data = JSON.parse(document.getElementById("attention-data")?.textContent ?? "null");
if (data) showAttention(data);

function showAttention({ words, layers, grid, prefix, picture }) {
  const state = readHash({ layer: 0, head: 0, query: words.length - 1 });
  const place = document.getElementById("attention");
  const [layerButtons, headButtons] = ["layer", "head"].map((name) => place.appendChild(row(name)));
  const said = place.appendChild(Object.assign(document.createElement("p"), { className: "note" }));
  const views = ["before", "after"].map((stage) => (grid ? patches : text)(place, stage));
  const all = place.appendChild(Object.assign(document.createElement("div"), { className: "maps", id: "all-heads" }));
  const image = picture ? Object.assign(new Image(), { src: picture, onload: () => draw() }) : null;
  for (const layer of layers) layer.maps = { before: decode(layer.before), after: decode(layer.after) };
  window.addEventListener("hashchange", () => draw(Object.assign(state, readHash(state))));
  draw();

  function row(name) {
    const made = Object.assign(document.createElement("div"), { className: "choices", id: `${name}s` });
    made.append(`${name} `);
    return made;
  }

  function readHash(usual) {
    const asked = new URLSearchParams(location.hash.slice(1));
    const read = (name, count) => Math.min(Math.max(0, Number(asked.get(name) ?? usual[name]) || 0), count - 1);
    const layer = read("layer", layers.length);
    return { layer, head: read("head", layers[layer].heads), query: read("query", words.length) };
  }

  function choose(change) {
    Object.assign(state, change);
    state.head = Math.min(state.head, layers[state.layer].heads - 1);
    history.replaceState(null, "", `#${new URLSearchParams(state)}`);
    draw();
  }

  function fill(buttons, name, labels) {
    while (buttons.childNodes.length > 1) buttons.lastChild.remove();
    labels.forEach((label, number) => {
      const button = Object.assign(document.createElement("button"), { textContent: label });
      button.setAttribute("aria-pressed", number === state[name]);
      for (const event of name === "head" ? ["pointerenter", "focus", "click"] : ["click"])
        button.addEventListener(event, () => state[name] !== number && choose({ [name]: number }));
      buttons.append(button);
    });
  }

  function press(buttons, number) {
    [...buttons.children].forEach((button, at) => button.setAttribute("aria-pressed", at === number));
  }

  function draw() {
    const layer = layers[state.layer];
    if (layerButtons.children.length !== layers.length) fill(layerButtons, "layer", layers.map((one) => one.name));
    if (headButtons.dataset.layer !== String(state.layer)) {
      fill(headButtons, "head", [...Array(layer.heads).keys()]);
      headButtons.dataset.layer = state.layer;
      all.replaceChildren(...Array.from({ length: layer.heads }, (_, head) => small(head)));
    }
    press(layerButtons, state.layer);
    press(headButtons, state.head);
    const looks = ["before", "after"].map((stage) => line(layer, stage));
    const most = Math.max(...looks.flat().map(Math.abs)) || 1;
    looks.forEach((values, stage) => views[stage](values, most));
    [...all.children].forEach((figure, head) => paintSmall(figure, layer, head));
    said.textContent = `${layer.name}, head ${state.head}: where ${JSON.stringify(words[state.query])} looks. ` +
      `Red is positive, blue negative; the strongest is ${most.toFixed(3)}.`;
  }

  function line(layer, stage, head = state.head, query = state.query) {
    const count = words.length;
    const start = (head * count + query) * count;
    const unit = layer[`${stage}_scale`][head][query] / 127;
    return Array.from(layer.maps[stage].subarray(start, start + count), (value) => value * unit);
  }

  function small(head) {
    const figure = document.createElement("figure");
    const [wide, high] = grid ? [96, 96 * grid[0] / grid[1]] : [words.length, words.length];
    figure.append(Object.assign(document.createElement("canvas"), { className: "small", width: wide, height: high }));
    figure.append(Object.assign(document.createElement("figcaption"), { textContent: `head ${head}` }));
    figure.addEventListener("click", () => choose({ head }));
    return figure;
  }

  // For an image: where the chosen patch looks. For a text: the whole map, a row per query, painted once per layer.
  function paintSmall(figure, layer, head) {
    figure.classList.toggle("chosen", head === state.head);
    const canvas = figure.firstChild;
    const context = canvas.getContext("2d");
    if (grid) return paintPatches(canvas, line(layer, "after", head));
    if (canvas.dataset.layer === String(state.layer)) return;
    canvas.dataset.layer = state.layer;
    const values = words.flatMap((_, query) => line(layer, "after", head, query));
    const most = values.reduce((largest, value) => Math.max(largest, Math.abs(value)), 0) || 1;
    const drawn = context.createImageData(canvas.width, canvas.height);
    values.forEach((value, at) => drawn.data.set([...hue(value), 255 * strength(value / most)], 4 * at));
    context.putImageData(drawn, 0, 0);
  }

  function paintPatches(canvas, values, most) {
    const context = canvas.getContext("2d");
    const of = values.slice(prefix);
    const limit = most ?? (Math.max(...of.map(Math.abs)) || 1);
    const [high, wide] = [canvas.height / grid[0], canvas.width / grid[1]];
    context.clearRect(0, 0, canvas.width, canvas.height);
    if (image?.complete && image.naturalWidth) context.drawImage(image, 0, 0, canvas.width, canvas.height);
    of.forEach((value, at) => {
      const [row, column] = [Math.floor(at / grid[1]), at % grid[1]];
      context.fillStyle = color(value / limit);
      context.fillRect(column * wide, row * high, wide, high);
      if (at + prefix === state.query) context.strokeRect(column * wide + 1, row * high + 1, wide - 2, high - 2);
    });
  }

  function text(place, stage, those = words) {
    if (those === words) place.append(Object.assign(document.createElement("div"), { className: "note", textContent: `${stage} composition` }));
    const made = place.appendChild(Object.assign(document.createElement("div"), { className: "words", id: those === words ? stage : `${stage}-prefix` }));
    const spans = those.map((word, at) => {
      const span = made.appendChild(Object.assign(document.createElement("span"), { textContent: shown(word) }));
      span.addEventListener("click", () => choose({ query: at }));
      return span;
    });
    return (values, most) => spans.forEach((span, at) => {
      span.style.background = color(values[at] / most);
      span.title = values[at].toFixed(3);
      span.classList.toggle("asks", at === state.query);
    });
  }

  function shown(word) {
    return word.replace(/\n/g, "\u23ce") + (data.is_spaced ? " " : "");
  }

  function patches(place, stage) {
    const maps = place.querySelector(".maps") ?? place.appendChild(Object.assign(document.createElement("div"), { className: "maps" }));
    const figure = maps.appendChild(document.createElement("figure"));
    const canvas = figure.appendChild(Object.assign(document.createElement("canvas"), { id: stage, width: 320, height: 320 * grid[0] / grid[1] }));
    figure.appendChild(Object.assign(document.createElement("figcaption"), { textContent: `${stage} composition` }));
    const paint = text(figure, stage, words.slice(0, prefix));
    const paintPrefix = (values, most) => paint(values.slice(0, prefix), most);
    canvas.addEventListener("click", ({ offsetX, offsetY }) => {
      const at = (offset, size, count) => Math.min(count - 1, Math.max(0, Math.floor(offset / size * count)));
      const [row, column] = [at(offsetY, canvas.clientHeight, grid[0]), at(offsetX, canvas.clientWidth, grid[1])];
      choose({ query: prefix + row * grid[1] + column });
    });
    return (values, most) => {
      paintPatches(canvas, values, most);
      canvas.dataset.values = values.map((value) => value.toFixed(3)).join(" ");
      paintPrefix(values, most);
    };
  }

  function hue(value) {
    return value >= 0 ? [202, 0, 32] : [5, 113, 176];
  }

  function strength(share) {
    return 0.75 * Math.abs(share);
  }

  function color(share) {
    return `rgba(${hue(share).join(", ")}, ${strength(share).toFixed(3)})`;
  }

  function decode(text) {
    return new Int8Array(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
  }
}
