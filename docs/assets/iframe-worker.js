// Lets the search work in pages that are opened from disk, where browsers refuse to start workers: a frame without a
// place on the page runs the worker's script instead. The theme looks for the name `IFrameWorker`.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.document.open();
      inside.document.write("<!doctype html><script src='" + encodeURI(url).replaceAll("'", "%27") + "'></" + "script>");
      // What the script posts is for the page, and not for the frame itself.
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.onload = () => {
        this.loaded = true;
        for (const data of this.waiting.splice(0)) this.postMessage(data);
      };
      inside.document.close();
    }
    postMessage(data) {
      if (this.loaded) this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
      else this.waiting.push(data);
    }
    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
