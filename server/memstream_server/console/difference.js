// The difference of two texts, word by word. Pure values.

/** Words that are compared; longer texts are shown whole, one after the other. */
const WORDS_MAX = 1_200;
const words = new Intl.Segmenter(undefined, { granularity: "word" });

/**
 * The parts of both texts in order, each { kind, text }: "same", "removed" (only in `before`) or "added" (only in
 * `after`).
 */
export function differenceOf(before, after) {
  const old = wordsOf(before);
  const young = wordsOf(after);
  let start = 0;
  while (start < old.length && start < young.length && old[start] === young[start]) start += 1;
  let end = 0;
  while (end < old.length - start && end < young.length - start && old.at(-1 - end) === young.at(-1 - end)) end += 1;
  const middle = compare(old.slice(start, old.length - end), young.slice(start, young.length - end));
  const same = (list) => list.map((text) => ({ kind: "same", text }));
  return joined([...same(old.slice(0, start)), ...middle, ...same(old.slice(old.length - end))]);
}

function wordsOf(text) {
  return Array.from(words.segment(text), ({ segment }) => segment);
}

/** Compares by the longest common subsequence. */
function compare(old, young) {
  const removed = (text) => ({ kind: "removed", text });
  const added = (text) => ({ kind: "added", text });
  if (old.length > WORDS_MAX || young.length > WORDS_MAX) return [...old.map(removed), ...young.map(added)];
  const width = young.length + 1;
  const common = new Uint16Array((old.length + 1) * width); // lengths of what the rests from here have in common
  for (let i = old.length - 1; i >= 0; i -= 1) {
    for (let j = young.length - 1; j >= 0; j -= 1) {
      common[i * width + j] = old[i] === young[j] ? common[(i + 1) * width + j + 1] + 1
        : Math.max(common[(i + 1) * width + j], common[i * width + j + 1]);
    }
  }
  const parts = [];
  let i = 0;
  let j = 0;
  while (i < old.length || j < young.length) {
    if (i < old.length && j < young.length && old[i] === young[j]) {
      parts.push({ kind: "same", text: old[i] });
      i += 1;
      j += 1;
    } else if (j === young.length || (i < old.length && common[(i + 1) * width + j] >= common[i * width + j + 1])) {
      parts.push(removed(old[i++]));
    } else {
      parts.push(added(young[j++]));
    }
  }
  return parts;
}

/** Neighbours of one kind become one part; spaces and signs alone between two changes do not separate them. */
function joined(parts) {
  const all = [];
  let pending = { removed: "", added: "" };
  let between = "";
  const flush = () => {
    for (const kind of ["removed", "added"]) if (pending[kind]) all.push({ kind, text: pending[kind] });
    if (between) all.push({ kind: "same", text: between });
    pending = { removed: "", added: "" };
    between = "";
  };
  for (const { kind, text } of parts) {
    if (kind !== "same") {
      pending.removed += between;
      pending.added += between;
      between = "";
      pending[kind] += text;
    } else if ((pending.removed || pending.added) && !/[\p{L}\p{N}]/u.test(text)) {
      between += text;
    } else {
      flush();
      if (all.at(-1)?.kind === "same") all.at(-1).text += text;
      else all.push({ kind, text });
    }
  }
  flush();
  return all;
}
