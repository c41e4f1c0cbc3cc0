// Browsers refuse workers from file://, and the search of this site is one. Read from a disk, it runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.ready = new Promise((done) => {
        document.addEventListener("DOMContentLoaded", start);
        if (document.readyState !== "loading") start();
        const worker = this;
        let begun = false;
        function start() {
          if (begun) return;
          begun = true;
          document.body.appendChild(frame);
          const inner = frame.contentWindow;
          inner.postMessage = (data) => worker.dispatchEvent(new MessageEvent("message", { data }));
          inner.importScripts = (...urls) =>
            urls.reduce((before, one) => before.then(() => load(inner, one)), Promise.resolve());
          load(inner, url).then(() => done(inner));
        }
      });
    }
    postMessage(data) {
      this.ready.then((inner) => inner.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {}
  };
  function load(inner, url) {
    return new Promise((done, failed) => {
      const script = inner.document.createElement("script");
      script.src = String(url);
      script.onload = done;
      script.onerror = failed;
      inner.document.body.appendChild(script);
    });
  }
}
