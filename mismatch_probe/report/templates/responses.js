"use strict";
(() => {
  // A token of a response that is pointed at, touched or stepped to says its log-probs.
  const times = (diff) => `${Math.exp(diff).toPrecision(3)} times as likely under pi as under mu`;

  function words(response, number, text) {
    const [logMu, diff] = [response.dataset.mu, response.dataset.diff].map((all) => all.split(",")[number]);
    const place = `Token ${(Number(response.dataset.first) + number).toLocaleString("en-US")} “${text}”`;
    if (!diff) return `${place}: not sampled by the policy, so it has no log-probs here`;
    const logPi = (Number(logMu) + Number(diff)).toFixed(4);
    return `${place}: log pi ${logPi}, log mu ${logMu}, d = ${diff} nats, ${times(Number(diff))}`;
  }

  for (const response of document.querySelectorAll(".response")) {
    const tokens = [...response.firstElementChild.children];
    const readout = response.parentElement.querySelector(".readout");
    let at = -1;
    function tell(number) {
      tokens[at]?.classList.remove("at");
      at = Math.max(0, Math.min(number, tokens.length - 1));
      tokens[at].classList.add("at");
      readout.hidden = false;
      readout.textContent = words(response, at, tokens[at].textContent);
    }
    const tellOf = ({ target }) => {
      const number = tokens.indexOf(target.closest(".response > bdi > *"));
      if (number >= 0) tell(number);
    };
    for (const event of ["pointerover", "click", "focusin"]) response.addEventListener(event, tellOf);
    response.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
      if (!step) return;
      event.preventDefault();
      tell(at + step);
      tokens[at].scrollIntoView({ block: "nearest" });
    });
  }

  // A link into what is folded opens it.
  addEventListener("hashchange", () => {
    const target = document.getElementById(location.hash.slice(1));
    target?.querySelector(":scope > .whole")?.setAttribute("open", "");
    for (let fold = target?.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
    target?.scrollIntoView({ block: "nearest" });
  });
})();
