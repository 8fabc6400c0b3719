"use strict";
// Fetches the page again every second and changes what differs. The server has escaped all
// untrusted text, and the page's policy allows no other script.
(() => {
  const byId = (id) => document.getElementById(id);
  const server = () => Number(document.documentElement.dataset.rendered);
  const style = document.querySelector("style").textContent;
  const code = document.querySelector("script").textContent;
  let ahead = Date.now() / 1000 - server(); // of this machine's clock, in seconds
  let etag = "";
  let lostAt = null;
  let state = byId("headline").dataset.spoken;

  const now = () => Date.now() / 1000 - ahead;

  function age(seconds) {
    const s = Math.max(0, Math.floor(seconds));
    const units = (a, m, b, n) => Math.floor(s / m) + " " + a + " " + Math.floor((s % m) / n) + " " + b + " ago";
    if (s < 60) return s + " s ago";
    if (s < 3600) return units("min", 60, "s", 1);
    if (s < 86400) return units("h", 3600, "min", 60);
    return units("d", 86400, "h", 3600);
  }

  function tick() {
    for (const time of document.querySelectorAll("time.ago")) {
      const text = age(now() - Number(time.dataset.at));
      if (time.textContent !== text) time.textContent = text;
    }
    if (lostAt === null) {
      byId("asof").textContent = new Date(now() * 1000).toISOString().slice(0, 19).replace("T", " ") + " UTC";
    } else {
      byId("connection").textContent = "The dashboard server does not respond. This page shows the state of " + age(now() - lostAt) + " and keeps reconnecting.";
    }
  }

  // Unchanged elements stay, with the reader's selection, focus and open details.
  function morph(was, is) {
    if (was.isEqualNode(is)) return;
    const old = [...was.childNodes], fresh = [...is.childNodes];
    const isAlike = was.nodeType === is.nodeType && was.nodeName === is.nodeName;
    if (isAlike && was.nodeType === Node.TEXT_NODE) {
      was.data = is.data;
    } else if (isAlike && was.nodeType === Node.ELEMENT_NODE && old.length === fresh.length) {
      for (const { name, value } of [...is.attributes]) {
        if (was.getAttribute(name) !== value) was.setAttribute(name, value);
      }
      for (const { name } of [...was.attributes]) {
        if (!is.hasAttribute(name) && name !== "open") was.removeAttribute(name);
      }
      old.forEach((node, i) => morph(node, fresh[i]));
    } else if (isAlike && was.matches("main, section, table, div")) {
      was.replaceChildren(...fresh);
    } else {
      was.replaceWith(is);
    }
  }

  function show(source) {
    const page = new DOMParser().parseFromString(source, "text/html");
    if (page.querySelector("style").textContent !== style || page.querySelector("script").textContent !== code) {
      location.reload();
      return;
    }
    document.documentElement.dataset.rendered = page.documentElement.dataset.rendered;
    document.documentElement.dataset.server = page.documentElement.dataset.server;
    ahead = Date.now() / 1000 - server();
    document.title = page.title;
    for (const part of document.querySelectorAll("[data-live]")) {
      const is = page.getElementById(part.id);
      if (is !== null) morph(part, document.adoptNode(is));
    }
    const spoken = byId("headline").dataset.spoken;
    if (spoken !== state) byId("spoken").textContent = state = spoken;
  }

  async function refresh() {
    if (document.hidden) return;
    try {
      const answer = await fetch(location.href, { headers: etag ? { "If-None-Match": etag } : {}, signal: AbortSignal.timeout(10000) });
      if (!answer.ok && answer.status !== 304) throw new Error(answer.statusText);
      etag = answer.headers.get("ETag") || "";
      if (answer.status === 200) show(await answer.text());
      if (lostAt !== null) byId("connection").textContent = "";
      lostAt = null;
      document.documentElement.dataset.live = document.documentElement.dataset.server;
    } catch (error) {
      if (lostAt === null) lostAt = now();
    }
  }

  async function run() {
    for (;;) {
      await refresh();
      tick();
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }

  run();
})();
