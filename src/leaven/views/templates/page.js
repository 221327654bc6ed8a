// Decompresses plotly.js, draws the charts in the colours of the theme, and sorts tables. A page of leaven serve loads
// plotly.js from the server. live.js dispatches the event "leaven:replaced" after it has replaced <main>.
(async () => {
  const root = document.documentElement;
  const read = () => JSON.parse(document.getElementById("charts").textContent);
  let { template, figures: charts } = read();
  const hidden = new Set();
  const boxes = name => document.getElementById("chart-" + name);

  // --- tables, legend and network, which do not wait for the charts
  const wire = () => {
    for (const table of document.querySelectorAll("table.sortable")) {
      const heads = [...table.querySelectorAll("th button")];
      heads.forEach((button, column) => button.addEventListener("click", () => {
        const head = button.closest("th"), up = head.getAttribute("aria-sort") !== "ascending";
        for (const other of heads) other.closest("th").removeAttribute("aria-sort");
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        for (const body of table.tBodies) {
          const key = row => row.cells[column].dataset.v ?? row.cells[column].textContent;
          const rows = [...body.rows].sort((a, b) => {
            const x = key(a), y = key(b), order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
            return up ? order : -order;
          });
          body.append(...rows);
        }
      }));
    }
    for (const switched of document.querySelectorAll(".all-rows")) {
      switched.addEventListener("change", () => {
        switched.closest("section").querySelector("table").classList.toggle("all", switched.checked);
      });
    }
    for (const button of document.querySelectorAll(".legend button")) {
      button.setAttribute("aria-pressed", String(!hidden.has(button.dataset.group)));
      button.addEventListener("click", () => {
        const group = button.dataset.group;
        if (!hidden.delete(group)) hidden.add(group);
        button.setAttribute("aria-pressed", String(!hidden.has(group)));
        if (root.dataset.charts === "drawn") draw();
      });
    }
  };
  for (const event of ["pointerover", "click"]) {
    addEventListener(event, ({ target }) => {
      const text = target.closest?.("[data-readout]")?.dataset.readout;
      if (text) target.closest("section").querySelector(".readout").textContent = text;
    });
  }

  // --- charts
  const fail = message => {
    for (const name in charts) boxes(name).append(Object.assign(document.createElement("p"), { textContent: message }));
    root.dataset.charts = "failed";
  };
  const themed = value => {
    const style = getComputedStyle(root);
    const walk = v => {
      if (typeof v === "string") {
        const name = /^var\((--[\w-]+)\)$/.exec(v);
        return name ? style.getPropertyValue(name[1]).trim() : v;
      }
      if (Array.isArray(v)) return v.map(walk);
      return v && typeof v === "object" ? Object.fromEntries(Object.entries(v).map(([k, w]) => [k, walk(w)])) : v;
    };
    return walk(value);
  };

  const inflate = async packed => {
    const bytes = Uint8Array.from(atob(packed.textContent), c => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const library = document.createElement("script");
    library.textContent = await new Response(stream).text();
    document.head.append(library);
  };
  const coarse = matchMedia("(pointer: coarse)").matches;
  const draw = () => Promise.all(Object.keys(charts).map(name => {
    const { data, layout } = themed(charts[name]), box = boxes(name);
    layout.template = themed(template);
    for (const trace of data) if (hidden.has(trace.legendgroup)) trace.visible = false;
    layout.width = box.clientWidth;
    layout.height = box.clientHeight;
    if (coarse) {  // a finger scrolls the page and does not zoom a chart
      layout.dragmode = false;
      for (const key in layout) if (/^[xy]axis/.test(key)) layout[key].fixedrange = true;
    }
    return Plotly.react(box, data, layout, { displayModeBar: false });
  }));
  wire();
  const packed = document.getElementById("plotly");
  if (packed && !("DecompressionStream" in window)) {
    return fail("This browser is too old to draw the charts (it lacks DecompressionStream); the tables are complete.");
  }
  try {
    if (packed) await inflate(packed);
    await draw();
  } catch (error) {
    console.error(error);
    return fail("The charts could not be drawn; the tables are complete.");
  }
  root.dataset.charts = "drawn";

  let waiting;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(draw, 120);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  document.addEventListener("leaven:replaced", () => {
    ({ template, figures: charts } = read());
    wire();
    draw();
  });
  // For printing, draw the charts in light colours at the width of the paper, and open folded parts.
  addEventListener("beforeprint", () => {
    root.classList.add("printing");
    for (const details of document.querySelectorAll("details")) details.open = true;
    draw();
  });
  addEventListener("afterprint", () => {
    root.classList.remove("printing");
    draw();
  });
})();
