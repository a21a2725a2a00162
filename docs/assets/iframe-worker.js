/* The search of this site runs in a Worker, and browsers start none from a file on disk. There, and only there, this
 * gives it a hidden frame instead: the same script, and messages that are copied and wait their turn, as a Worker's. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.channel = new MessageChannel()
      this.channel.port1.onmessage = event => this.hear(event.data)
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.title = "Search" // hidden, but every frame wants a name
      this.frame.onload = () => this.begin(this.frame.contentWindow, new URL(url, location.href))
      document.body.append(this.frame)
    }
    begin(inside, url) {
      const port = this.channel.port2
      inside.postMessage = data => port.postMessage(data)
      const script = inside.document.createElement("script")
      script.src = url
      script.onload = () => {
        port.onmessage = event => inside.dispatchEvent(new MessageEvent("message", {data: event.data}))
      }
      inside.document.head.append(script)
    }
    hear(data) {
      const event = new MessageEvent("message", {data})
      this.dispatchEvent(event)
      if (this.onmessage) this.onmessage(event)
    }
    postMessage(data) {
      this.channel.port1.postMessage(data)
    }
    terminate() {
      this.channel.port1.close()
      this.frame.remove()
    }
  }
}
