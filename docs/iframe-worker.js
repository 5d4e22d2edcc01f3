/* Search runs in a worker, and browsers give none to pages that were opened from a disk: there it runs in a hidden frame. */
if (location.protocol === "file:") {
  const inside = `
    postMessage = (data) => parent.postMessage(data, "*");
    importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((loaded) => {
      const script = document.createElement("script");
      script.src = url;
      script.onload = loaded;
      document.body.appendChild(script);
    })), Promise.resolve());`;
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const view = this.frame.contentWindow;
      addEventListener("message", (event) => {
        if (event.source !== view) return;
        const told = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(told);
        if (this.onmessage) this.onmessage(told);
      });
      view.document.open();
      view.document.write(`<body><script>${inside}<\/script><script src="${url}"><\/script></body>`);
      view.document.close();
      this.ready = new Promise((loaded) => { view.onload = loaded; });
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
