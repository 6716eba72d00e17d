"""What `slides` puts around a lecture: the template of nbconvert, and the script that cuts slides into pages.

A notebook's slide is as tall as its cells. The script measures them in the browser that shows the deck, whose fonts
are the ones that count, and moves what does not fit to further pages of the same slide. Breaks go where they hurt
least: a title stays with what it announces, a picture with the sentence under it, code with what it prints.
"""

from __future__ import annotations

STYLE = """
:root { --jp-content-font-size1: 21px; --jp-code-font-size: 15px; --jp-code-line-height: 1.27; }
.reveal { font-size: 21px; }
.reveal .slides { text-align: left; }
.reveal .slides section { max-height: 100%; overflow-y: auto; box-sizing: border-box; padding: 16px 0; }
.reveal .slides section.stack { padding: 0; overflow: visible; }
.reveal .slides section.probe { display: block; visibility: hidden; max-height: none; }
.reveal .slides h1, .reveal .slides h2, .reveal .slides h3 { text-transform: none; letter-spacing: 0; }
.reveal .slides :is(h1, h2, h3) { margin: 22px 0 14px; }
.reveal .slides :is(h1, h2, h3):first-child { margin-top: 0; }
.reveal .slides .again { color: #595959; font-size: 20px; line-height: 28px; height: 40px; margin: 0; }
.reveal .slides .block { display: flow-root; }
.reveal .slides .jp-Cell { margin: 0; padding: 4px 0; }
.reveal .slides .input .jp-Cell { padding: 0; }
.reveal .slides .jp-OutputArea-output { padding: 0; }
.reveal .slides .jp-InputArea-editor { border: 0; background: #f5f5f5; }
.reveal .slides .highlight { margin: 0; padding: 0 10px; background: none; }
.reveal .slides .highlight pre { white-space: pre-wrap; padding: 0; }
.reveal .slides pre { width: 100%; box-sizing: border-box; margin: 0; box-shadow: none; }
.reveal .slides pre { max-height: none; overflow: visible; }
.reveal .slides .jp-RenderedText pre { padding: 0 10px; white-space: pre-wrap; }
.reveal .slides .jp-RenderedText pre { word-break: normal; overflow-wrap: anywhere; }
.reveal .slides .jp-RenderedText[data-mime-type="application/vnd.jupyter.stderr"] { background: none; }
.reveal .slides section img { max-height: 410px; max-width: 100%; margin: 0; }
.reveal .jp-InputPrompt, .reveal .jp-OutputPrompt, .reveal .jp-Collapser { display: none; }
"""

SCRIPT = r"""
const WIDTH = 1280, HEIGHT = 720, ROOM = HEIGHT - 32, AGAIN = 40, LINES = 30;

/** The parts of a slide that may stand on different pages: text cells, paragraphs of code, single outputs. */
function blocksOf(section) {
  const blocks = [];
  for (const cell of section.querySelectorAll('.jp-Cell')) {
    const fragment = cell.closest('.fragment'), add = (kind, node) => blocks.push(blockOf(kind, node, fragment));
    if (cell.closest('aside')) continue;
    if (!cell.classList.contains('jp-CodeCell')) { add('prose', cell.cloneNode(true)); continue; }
    for (const code of paragraphs(cell.querySelector('.jp-Cell-inputWrapper pre'))) {
      const part = holding(cell, code);
      part.querySelector('.jp-Cell-outputWrapper')?.remove();
      add('input', part);
    }
    cell.querySelectorAll('.jp-OutputArea-child').forEach((_, i) => {
      const part = only(cell, '.jp-OutputArea-child', i);
      part.querySelector('.jp-Cell-inputWrapper')?.remove();
      const texts = part.querySelector('img, svg') ? [] : paragraphs(part.querySelector('pre'));
      for (const text of texts) add('output', holding(part, text));
      if (!texts.length) add('picture', part);
    });
  }
  return blocks;
}

function blockOf(kind, cell, fragment) {
  const node = document.createElement('div');
  node.className = `block ${kind}`;
  cell.removeAttribute('id');
  node.append(cell);
  return {kind, node, fragment, heading: kind === 'prose' && !!node.querySelector('h1, h2, h3')};
}

/** The paragraphs of a text block that is too tall for a page; else the block. */
function byParagraph(block) {
  if (block.kind !== 'prose' || block.height <= ROOM) return [block];
  const parts = '.jp-RenderedMarkdown > *';
  return [...block.node.querySelectorAll(parts)].map(
    (_, i) => blockOf('prose', only(block.node.firstChild, parts, i), block.fragment));
}

/** A copy of `cell` with the `wanted`th of its parts and without the others. */
function only(cell, parts, wanted) {
  const copy = cell.cloneNode(true);
  copy.querySelectorAll(parts).forEach((part, i) => { if (i !== wanted) part.remove(); });
  return copy;
}

/** A copy of `cell` with `pre` in the place of its first text. */
function holding(cell, pre) {
  const copy = cell.cloneNode(true);
  copy.querySelector('pre').replaceWith(pre);
  return copy;
}

/** Copies of `pre`, cut where a blank line ends an indented part, and after LINES lines at most. */
function paragraphs(pre) {
  if (!pre) return [];
  const parts = [];
  let begin = 0, at = 0, lines = 0, blank = false;
  for (const line of pre.textContent.split(/(?<=\n)/)) {
    if (lines === LINES || (blank && /^\S/.test(line))) {
      parts.push(piece(pre, begin, at));
      [begin, lines] = [at, 0];
    }
    [at, lines, blank] = [at + line.length, lines + 1, !line.trim()];
  }
  return [...parts, piece(pre, begin, at)];
}

/** A copy of `pre` that holds the characters from `begin` to `end`, in the same colours. */
function piece(pre, begin, end) {
  const copy = pre.cloneNode(false), range = document.createRange();
  range.setStart(...place(pre, begin));
  range.setEnd(...place(pre, end));
  copy.append(range.cloneContents());
  return copy;
}

function place(root, offset) {
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  let node;
  while ((node = walker.nextNode())) {
    if (offset <= node.length) return [node, offset];
    offset -= node.length;
  }
  return [root, root.childNodes.length];
}

/** How much a page break between two blocks disturbs a reader. */
function price(block, next) {
  if (block.heading) return 9;
  if (block.kind === 'picture' && next.kind === 'prose' && !next.heading) return 6;
  if (block.kind === 'input' && next.kind !== 'prose') return 3;
  return next.kind === 'output' ? 3 : 1;
}

/** The cheapest way to put `blocks` on pages, as a list of lists. Every page costs as much as some breaks. */
function paginate(blocks) {
  const best = [{cost: 0, from: 0}];
  for (let end = 1; end <= blocks.length; end++) {
    best[end] = {cost: Infinity, from: end - 1};
    for (let from = end - 1, height = 0; from >= 0; from--) {
      height += blocks[from].height;
      if (height > ROOM - (from ? AGAIN : 0) && from < end - 1) continue;
      const cost = best[from].cost + 6 + (from ? price(blocks[from - 1], blocks[from]) : 0);
      if (cost < best[end].cost) best[end] = {cost, from};
    }
  }
  const pages = [];
  for (let end = blocks.length; end > 0; end = best[end].from) pages.unshift(blocks.slice(best[end].from, end));
  return pages;
}

/** `blocks`, each with the height that it has on a page. */
function measured(blocks) {
  const probe = document.createElement('section');
  probe.className = 'probe';
  probe.style.width = `${WIDTH}px`;
  probe.append(...blocks.map(block => block.node));
  document.querySelector('.reveal .slides').append(probe);
  for (const block of blocks) block.height = block.node.getBoundingClientRect().height;
  probe.remove();
  return blocks;
}

/** The pages of one slide, in its place. A page that ends where a fragment begins needs no fragment. */
function cut(section) {
  const title = section.querySelector('h1, h2, h3')?.textContent ?? '';
  const blocks = measured(measured(blocksOf(section)).flatMap(byParagraph));
  const pages = paginate(blocks).map((page, number) => {
    const result = section.cloneNode(false);
    if (number) {
      const again = document.createElement('p');
      again.className = 'again';
      again.textContent = `${title}, continued`;
      result.append(again);
    }
    let open = null, into = result;
    for (const block of page) {
      if (block.fragment !== open) {
        open = block.fragment;
        into = result;
        if (open && block !== page[0]) result.append(into = open.cloneNode(false));
      }
      into.append(block.node);
    }
    return result;
  });
  pages[0]?.append(...section.querySelectorAll('aside'));
  if (pages.length) section.replaceWith(...pages);
}

window.addEventListener('load', async () => {
  await window.MathJax?.startup?.promise;
  await document.fonts.ready;
  document.querySelectorAll('.reveal .slides > section > section').forEach(cut);
  await Reveal.initialize({
    controls: true, progress: true, hash: true, slideNumber: 'c/t', transition: 'none', center: false,
    navigationMode: 'linear', width: WIDTH, height: HEIGHT, margin: 0.03, plugins: [RevealNotes]
  });
});
"""

# Plain script tags: no module loader, no jQuery, nothing from another host. MathJax draws SVG, which needs no fonts.
TEMPLATE = (
    r"""
{%- extends 'index.html.j2' -%}

{%- block html_head_js -%}{%- endblock -%}
{%- block html_head_js_mathjax -%}
<script>
window.MathJax = {
  tex: {inlineMath: [['$', '$'], ['\\(', '\\)']], processEscapes: true, tags: 'ams'},
  options: {skipHtmlTags: ['script', 'noscript', 'style', 'textarea', 'pre', 'code']}
};
</script>
<script defer src="vendor/mathjax/tex-svg-full.js"></script>
{%- endblock -%}
{%- block html_head_css -%}{%- endblock -%}

{%- block data_png scoped -%}
{%- set about = output.metadata.get('image/png', {}) -%}
<div class="jp-RenderedImage jp-OutputArea-output {{ extra_class }}">
<img alt="{{ about.get('alt', '') | escape_html }}" src="data:image/png;base64,{{ output.data['image/png'] }}">
</div>
{%- endblock -%}

{%- block footer_js -%}
<style>"""
    + STYLE
    + r"""</style>
<script src="vendor/reveal.js/dist/reveal.js"></script>
<script src="vendor/reveal.js/plugin/notes/notes.js"></script>
<script>"""
    + SCRIPT
    + r"""</script>
{%- endblock -%}
"""
)
