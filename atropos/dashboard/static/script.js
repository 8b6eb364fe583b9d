"use strict";
// The live page fetches its fragment every two seconds; without this script it is a page to reload.
const live = document.getElementById("live");
const button = document.getElementById("pause");
const stale = document.getElementById("stale");
if (live && button && stale) {
  let paused = false;
  // Announced once, not at every refresh.
  const say = (text) => {
    if (stale.textContent !== text) stale.textContent = text;
  };
  button.addEventListener("click", () => {
    paused = !paused;
    button.setAttribute("aria-pressed", String(paused));
    button.textContent = paused ? "Resume" : "Pause";
  });
  const refresh = async () => {
    if (!paused && !document.hidden) {
      let told = "The dashboard does not answer; these are the last numbers it gave.";
      try {
        const answer = await fetch(`/live${location.search}`, { cache: "no-store" });
        if (answer.status === 401) told = "Another dashboard answers here, or this one was started again: open the URL that it printed.";
        if (!answer.ok) throw new Error(String(answer.status));
        const parsed = new DOMParser().parseFromString(await answer.text(), "text/html");
        if (!paused) live.replaceChildren(...parsed.body.childNodes); // pressed while this answer was on its way
        told = live.querySelector(".trouble") ? "There is trouble; see below." : "";
      } catch {
        // what is shown stays
      }
      say(told);
    }
    setTimeout(refresh, 2000);
  };
  setTimeout(refresh, 2000);
}
