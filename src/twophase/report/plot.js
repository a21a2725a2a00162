// Draws the charts of a page with uPlot. Each figure of class plot holds its data as JSON (twophase.report.plot), an
// empty <div> for the picture, and an empty list for the legend. `plots.draw(figure, data)` draws it again, with other
// data where a page lets its reader choose; `plots.redraw()` takes over colours that have changed.
const plots = (() => {
  "use strict"
  // Strokes of the curves 0 to 7, as in figures/style.py; their colours are --c0 to --c7 of plot.css.
  const DASHES = [[], [7, 4], [], [8, 3, 2, 3], [5, 2, 2, 2, 2, 2], [10, 3], [2, 3], [2, 2]]
  const MOST_MARKS = 60, FONT = "12px system-ui, sans-serif"
  const drawn = new Map()
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim() || "#000"
  const make = (name, attributes = {}, ...children) => {
    const element = document.createElement(name)
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value)
    element.append(...children)
    return element
  }
  const text = (value, digits = 4) => {
    if (value == null) return "–"
    const large = value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)
    // Steps are counted, not rounded.
    const most = {maximumSignificantDigits: Number.isInteger(value) ? Math.max(6, digits) : digits}
    const shown = large ? value.toExponential(digits - 2).replace(/(\.?0+)?e\+?/, "e") : value.toLocaleString("en", most)
    return shown.replace(/-/g, "−")
  }
  // As many digits as tell neighbours on an axis apart.
  const texts = values => {
    const gaps = values.slice(1).map((value, k) => value - values[k]), farthest = Math.max(...values.map(Math.abs))
    const digits = Math.ceil(Math.log10(farthest / Math.min(...gaps))) + 2
    return values.map(value => text(value, Math.max(4, Math.min(12, digits || 4))))
  }
  const stroke = number => `--c${number % 8}`
  const dash = number => DASHES[number % 8]

  const swatch = (number, kind) => {
    const space = "http://www.w3.org/2000/svg"
    const svg = document.createElementNS(space, "svg"), path = document.createElementNS(space, "path")
    svg.setAttribute("viewBox", "0 0 38 12")
    svg.setAttribute("aria-hidden", "true")
    path.setAttribute("d", {restart: "M19,0V12", sync: "M5,11v-6M19,11v-6M33,11v-6M1,11H37"}[kind] ?? "M1,6H37")
    path.style.stroke = `var(${{restart: "--rule", sync: "--ink"}[kind] ?? stroke(number)})`
    path.style.strokeDasharray = kind === "restart" ? "1 3" : kind === "sync" ? "" : dash(number).join(" ")
    if (kind === "dots") path.setAttribute("d", "M19,6h.01")
    if (kind === "dots") path.style.cssText += "stroke-width:8;stroke-linecap:round;stroke-dasharray:none"
    svg.append(path)
    return svg
  }

  // What uPlot draws: one column of places that all curves share, and a column for each curve.
  const columns = data => data.series.length ? uPlot.join(data.series.map(({x, y}) => [x, y])) : [[0]]
  const isolated = (u, series) => {
    const y = u.data[series].map((value, place) => [value, place]).filter(([value]) => value !== undefined)
    return y.filter(([value], k) => value !== null && y[k - 1]?.[0] == null && y[k + 1]?.[0] == null).map(([, place]) => place)
  }
  const nearest = (column, place) => {
    while (place > 0 && column[place] === undefined) place -= 1
    return column[place]
  }

  const range = data => (u, low, high) => {
    if (low == null) return data.log ? [1, 10] : [0, 1]
    if (data.level && !data.log) [low, high] = [Math.min(low, data.level[1]), Math.max(high, data.level[1])]
    if (data.bulk) [low, high] = [Math.max(low, data.bulk[0]), Math.min(high, data.bulk[1])]
    if (data.log) [low, high] = [Math.log10(low), Math.log10(high)]
    const room = 0.06 * (high - low) || (data.log ? 0.1 : 0.05 * Math.abs(high) || 0.5)
    return data.log ? [10 ** (low - room), 10 ** (high + room)] : [low - room, high + room]
  }
  const size = (u, values, number, cycle) => {
    if (cycle > 1) return u.axes[number]._size
    const longest = (values ?? []).reduce((a, b) => a.length > b.length ? a : b, "")
    u.ctx.font = FONT
    return Math.ceil(u.ctx.measureText(longest).width) + 14
  }
  const axis = (label, more) => ({
    label, labelSize: 18, font: FONT, labelFont: FONT, stroke: () => colour("--soft"),
    grid: {stroke: () => colour("--hair"), width: 1}, ticks: {show: false}, size: 24,
    values: (u, splits) => texts(splits), ...more,
  })
  // Round numbers at equal distances, where a logarithmic axis is too short for those of decades.
  const even = (low, high) => {
    const unit = 10 ** Math.floor(Math.log10((high - low) / 4))
    const step = [1, 2, 5, 10].map(digit => digit * unit).find(step => (high - low) / step < 6)
    const first = Math.ceil(low / step), count = Math.floor(high / step) - first + 1
    return Array.from({length: count}, (_, k) => Number(((first + k) * step).toPrecision(12)))
  }
  // Round numbers of one, two or three a decade, as many as fit.
  const decades = (u, number, low, high) => {
    const all = digits => {
      const places = []
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
        for (const digit of digits) places.push(Number((digit * 10 ** power).toPrecision(6)))
      }
      return places.filter(place => low <= place && place <= high)
    }
    const finest = [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9]
    const choices = [[1], [1, 3], [1, 2, 5], [1, 1.5, 2, 3, 5, 7], finest].map(all)
    const places = choices.find(places => places.length >= 4) ?? (choices.at(-1).length > 1 ? choices.at(-1) : even(low, high))
    return places.filter((_, k) => k % Math.ceil(places.length / 7) === 0)
  }
  const whole = Array.from({length: 12}, (_, power) => [1, 2, 5].map(digit => digit * 10 ** power)).flat()
  const across = (data, x, width) => {
    if (data.names) {
      const longest = Math.max(...data.names.map(name => name.length)), slanted = longest * data.names.length > width / 8
      const more = slanted ? {rotate: 40, size: 14 + 5 * Math.min(longest, 32)} : {}
      const names = data.names.map(name => name.length > 32 ? `${name.slice(0, 31)}…` : name)
      return axis(data.x, {splits: () => names.map((_, k) => k), values: () => names, grid: {show: false}, ...more})
    }
    return axis(data.x, x.every(Number.isInteger) ? {incrs: whole} : {})
  }

  // Restarts, syncs and the level, which are no curves. Of many marks some are drawn, and the legend says so.
  const skipped = places => Math.ceil(places.length / MOST_MARKS)
  const marked = (name, places) => skipped(places) > 1 ? `${name}, some of them` : name
  const marks = data => u => {
    const {left, top, width, height} = u.bbox, ratio = devicePixelRatio
    const line = (places, name, strokes, path) => {
      const step = skipped(places)
      u.ctx.save()
      u.ctx.beginPath()
      u.ctx.rect(left, top, width, height)
      u.ctx.clip()
      u.ctx.strokeStyle = colour(name)
      u.ctx.lineWidth = ratio
      u.ctx.setLineDash(strokes.map(length => length * ratio))
      u.ctx.beginPath()
      places.filter((_, k) => k % step === 0).forEach(path)
      u.ctx.stroke()
      u.ctx.restore()
    }
    const vertical = (from, to) => place => {
      const x = u.valToPos(place, "x", true)
      u.ctx.moveTo(x, from)
      u.ctx.lineTo(x, to)
    }
    line(data.restarts ?? [], "--rule", [1, 3], vertical(top, top + height))
    line(data.syncs ?? [], "--ink", [], vertical(top + height, top + height - 5 * ratio))
    line(data.level ? [data.level[1]] : [], stroke(data.series.length), dash(data.series.length), value => {
      const y = u.valToPos(value, "y", true)
      u.ctx.moveTo(left, y)
      u.ctx.lineTo(left + width, y)
    })
  }

  const table = data => [
    ["series", data.x, data.y],
    // A spreadsheet takes a text that begins like this for a formula, and the name may be from a file.
    ...data.series.flatMap(({name, x, y}) => x.map((place, k) => [name.replace(/^(?=[=+\-@\t])/, "'"), place, y[k] ?? ""])),
    ...(data.restarts ?? []).map(place => ["restart", place, ""]),
  ]
  const csv = data => table(data).map(row => row.map(cell => /[",\n]/.test(cell) ? `"${cell.replace(/"/g, '""')}"` : cell).join(",")).join("\n") + "\n"

  const draw = (figure, data) => {
    drawn.get(figure)?.end()
    const [box, legend] = [figure.querySelector(":scope > div"), figure.querySelector(".legend")]
    const place_text = value => Number.isInteger(value) ? value.toLocaleString("en") : text(value)
    const x_name = value => data.names ? data.names[Math.round(value)] : `${data.x} ${place_text(value)}`
    const place = make("li", {class: "place"}), values = data.series.map(() => make("output"))
    const live = make("p", {class: "quiet", "aria-live": "polite"})
    const at = u => u.cursor.idx == null ? [] : data.series.map((_, k) => nearest(u.data[k + 1], u.cursor.idx))
    const show = u => {
      const now = at(u)
      place.textContent = now.length ? x_name(u.data[0][u.cursor.idx]) : ""
      values.forEach((output, k) => { output.textContent = now.length && !data.names ? text(now[k]) : "" })
    }
    const columned = columns(data), x = columned[0]
    const options = {
      width: box.clientWidth, height: box.clientHeight, legend: {show: false},
      // The cursors of all charts over the same quantity move together.
      cursor: {sync: {key: data.x}, y: false, drag: {x: true, y: false}},
      scales: {
        x: {time: false, range: (u, low, high) => data.names ? [-0.5, data.names.length - 0.5] : low === high ? [low - 1, high + 1] : [low, high]},
        y: {distr: data.log ? 3 : 1, range: range(data)},
      },
      axes: [across(data, x, box.clientWidth), axis(data.y, {size, ...(data.log ? {splits: decades, filter: (u, splits) => splits} : {})})],
      series: [{}, ...data.series.map(({dots, look}, k) => ({
        stroke: () => colour(stroke(look ?? k)), width: 1.8, dash: dash(look ?? k),
        ...(dots ? {paths: () => null, points: {show: true, size: 9, fill: () => colour(stroke(look ?? k))}}
          : {points: {show: false, size: 5, filter: isolated, fill: () => colour(stroke(look ?? k))}}),
      }))],
      hooks: {drawAxes: [marks(data)], setCursor: [show]},
    }
    box.replaceChildren()
    const u = new uPlot(options, columned, box)
    const toggles = data.series.map(({name, dots, look}, k) => {
      const button = make("button", {type: "button", "aria-pressed": "true"}, swatch(look ?? k, dots ? "dots" : ""), name)
      button.onclick = () => {
        if (data.remove) return data.remove(k)
        const on = button.getAttribute("aria-pressed") !== "true"
        button.setAttribute("aria-pressed", on)
        u.setSeries(k + 1, {show: on})
      }
      return make("li", {}, button, values[k])
    })
    if (data.level) toggles.push(make("li", {}, swatch(data.series.length), data.level[0]))
    if (data.syncs?.length) toggles.push(make("li", {}, swatch(0, "sync"), marked("sync (outer step)", data.syncs)))
    if (data.restarts?.length) toggles.push(make("li", {}, swatch(0, "restart"), marked("restart", data.restarts)))
    legend.replaceChildren(place, ...toggles)
    const link = figure.querySelector("a[download]")
    if (link) {
      link.hidden = false
      link.href = `data:text/csv;charset=utf-8,${encodeURIComponent(csv(data))}`
    }

    const words = () => `${x_name(x[u.cursor.idx])}: ${at(u).map((value, k) => `${data.series[k].name} ${text(value)}`).join("; ")}`
    box.tabIndex = 0
    box.setAttribute("role", "application")
    box.setAttribute("aria-roledescription", "chart; arrow keys read its values")
    box.append(live)
    box.onkeydown = event => {
      if (event.altKey || event.ctrlKey || event.metaKey) return  // the browser's: back, the end of the page
      const [first, last] = u.series[0].idxs, now = u.cursor.idx, page = Math.ceil((last - first) / 10)  // of what is in view
      const to = {
        ArrowRight: (now ?? first - 1) + 1, ArrowLeft: (now ?? last + 1) - 1,
        PageUp: (now ?? first) + page, PageDown: (now ?? last) - page, Home: first, End: last,
      }[event.key]
      if (to === undefined && event.key !== "Escape") return
      event.preventDefault()
      if (to === undefined) return u.setCursor({left: -10, top: -10})
      u.setCursor({left: u.valToPos(x[Math.max(first, Math.min(last, to))], "x"), top: 10})
      live.textContent = words()
    }
    box.onblur = () => u.setCursor({left: -10, top: -10})
    const fit = new ResizeObserver(() => u.setSize({width: box.clientWidth, height: box.clientHeight}))
    fit.observe(box)
    drawn.set(figure, {redraw: () => u.redraw(), end: () => { fit.disconnect(); u.destroy() }})
  }

  // A chart of the reader's choice: the page's buttons put curves on it, and its legend takes them out.
  const choose = (figure, data) => {
    const buttons = [...document.querySelectorAll("button[data-curve]")], looks = new Map()
    const update = () => {
      const chosen = [...looks]
      for (const button of buttons) button.setAttribute("aria-pressed", looks.has(Number(button.dataset.curve)))
      const remove = place => toggle(chosen[place][0])
      draw(figure, {...data, remove, series: chosen.map(([number, look]) => ({...data.series[number], look}))})
    }
    const add = number => {
      const used = new Set(looks.values())
      looks.set(number, used.size < DASHES.length ? DASHES.findIndex((_, look) => !used.has(look)) : used.size)
    }
    const toggle = number => {
      if (!looks.delete(number)) add(number)
      update()
    }
    for (const button of buttons) button.onclick = () => toggle(Number(button.dataset.curve))
    data.shown.forEach(add)
    update()
  }

  const redraw = () => drawn.forEach(chart => chart.redraw())
  for (const figure of document.querySelectorAll("figure.plot")) {
    const data = JSON.parse(figure.querySelector("script").text)
    data.series.forEach((series, k) => { series.x ??= data.series[k - 1].x })
    if (data.shown) choose(figure, data)
    else draw(figure, data)
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw)
  const printing = on => () => { document.documentElement.classList.toggle("printed", on); redraw() }
  addEventListener("beforeprint", printing(true))
  addEventListener("afterprint", printing(false))
  return {draw, redraw, text: value => text(value)}
})()
