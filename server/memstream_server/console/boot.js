// Loads the page, and again when the server is back: it may restart while the page loads.

const RETRY_MS = 1_000;

async function waitForServer() {
  const main = document.getElementById("main");
  main.textContent = "The server does not answer yet. The page loads when it does.";
  for (;;) {
    await new Promise((resolve) => { setTimeout(resolve, RETRY_MS); });
    try {
      const answer = await fetch(new URL("app.js", import.meta.url), { cache: "no-store" });
      if (answer.ok) break;
    } catch {
      // not yet
    }
  }
  location.reload(); // a module that failed once stays failed in this document
}

import("./app.js").catch(waitForServer);
