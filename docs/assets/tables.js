/* A table that is wider than its column can be pushed sideways with a finger; this lets the arrow keys do so too, and
 * tells screen readers what the part of the page is that they come to. Tables that fit are no stop on anybody's way. */
const named = box => {
  const headings = [...document.querySelectorAll("article :is(h1, h2, h3, h4)")]
  const above = headings.filter(one => one.compareDocumentPosition(box) & Node.DOCUMENT_POSITION_FOLLOWING).pop()
  const words = [...(above?.childNodes ?? [])].filter(one => !one.classList?.contains("headerlink"))
  return "Table: " + (words.map(one => one.textContent).join("").trim() || document.title)
}
const sizes = new ResizeObserver(entries => {
  for (const { target } of entries) {
    const box = target.closest(".md-typeset__scrollwrap")
    if (box.scrollWidth > box.clientWidth) {
      box.tabIndex = 0
      box.setAttribute("role", "region")
      box.setAttribute("aria-label", named(box))
    } else {
      for (const name of ["tabindex", "role", "aria-label"]) box.removeAttribute(name)
    }
  }
})
/* Browsers break a line after any hyphen: an option such as --outer.lr would end its line as two dashes. */
const keepWhole = code => {
  for (const text of [...code.childNodes].filter(node => node.nodeType === Node.TEXT_NODE && /-\S/.test(node.data))) {
    const words = text.data.split(/(\s+)/).map(word => {
      if (!/-\S/.test(word) || word.length > 40) return word
      const span = document.createElement("span")
      span.className = "whole"
      span.textContent = word
      return span
    })
    text.replaceWith(...words)
  }
}
window.document$.subscribe(() => {
  document.querySelectorAll("article table:not([class]) td code").forEach(keepWhole)
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap")) {
    sizes.observe(box)
    sizes.observe(box.firstChild)
  }
})
