// Keeps a page of leaven serve up to date: requests the page every two seconds, or after a change of the planner's form,
// and replaces <main>.
(() => {
  const status = document.getElementById("live"), form = document.querySelector("form.planner");
  let tag = status.dataset.tag, address = location.href, asking;
  const replace = text => {
    const page = new DOMParser().parseFromString(text, "text/html");
    const open = new Set([...document.querySelectorAll("main details[open] > summary")].map(each => each.textContent));
    for (const box of document.querySelectorAll(".js-plotly-plot")) Plotly.purge(box);
    document.getElementById("charts").textContent = page.getElementById("charts").textContent;
    document.querySelector("main").replaceWith(page.querySelector("main"));
    for (const summary of document.querySelectorAll("main details > summary")) {
      if (open.has(summary.textContent)) summary.parentElement.open = true;
    }
    document.title = page.title;
    document.dispatchEvent(new Event("leaven:replaced"));
  };
  const ask = async () => {
    asking?.abort();
    asking = new AbortController();
    try {
      const headers = tag ? { "If-None-Match": tag } : {};
      const answer = await fetch(address, { headers, cache: "no-store", signal: asking.signal });
      if (answer.status === 200) {
        replace(await answer.text());
        tag = answer.headers.get("ETag");
      }
      status.textContent = answer.ok || answer.status === 304 ? "" : await answer.text();
    } catch (error) {
      if (error.name !== "AbortError") status.textContent = "leaven serve does not answer; start it again";
    }
  };
  if (tag) {
    const poll = async () => {
      if (!document.hidden) await ask();
      setTimeout(poll, 2000);
    };
    setTimeout(poll, 2000);
  }
  let waiting;
  const answer = () => {
    address = form.action + "?" + new URLSearchParams(new FormData(form));
    history.replaceState(null, "", address);
    ask();
  };
  form?.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(answer, 250);
  });
  form?.addEventListener("submit", event => {
    event.preventDefault();
    answer();
  });
})();
