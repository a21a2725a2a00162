// Filters the list of `twophase ui`, and takes over its newest rows with what was chosen.
const [words, state, count, body] = ["#words", "#state", "#count", "tbody"].map(name => document.querySelector(name))
const filter = () => {
  const wanted = words.value.toLowerCase().split(/\s+/)
  const rows = [...body.rows]
  for (const row of rows) {
    const text = row.textContent.toLowerCase()
    const fits = wanted.every(word => text.includes(word)) && (!state.value || row.cells[3].textContent === state.value)
    // What is chosen stays in sight, and is laid over the others.
    row.hidden = !fits && !row.querySelector("input:checked")
  }
  count.textContent = `${rows.filter(row => !row.hidden).length} of ${rows.length} shown`
}
const renew = async () => {
  if (document.hidden || body.contains(document.activeElement)) return
  const answer = await fetch("/").catch(() => null)
  if (!answer?.ok) return
  const page = new DOMParser().parseFromString(await answer.text(), "text/html")
  const [title, fresh] = ["caption", "tbody"].map(name => page.querySelector(name))
  const chosen = new Set([...body.querySelectorAll("input:checked")].map(box => box.value))
  document.querySelector("caption").replaceWith(title)  // the number of folders
  body.replaceChildren(...fresh.rows)
  for (const box of body.querySelectorAll("input")) box.checked = chosen.has(box.value)
  filter()
}
words.addEventListener("input", filter)
state.addEventListener("change", filter)
filter()
setInterval(renew, 5000)
