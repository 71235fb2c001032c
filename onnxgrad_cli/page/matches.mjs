// Whether the largest score along the axis of the classes is that of the label, for each label that counts.
export function matches({ data: scores, dims }, { data: labels }, { class_axis: axis, ignore_index: ignored }) {
  const classes = dims.at(axis);
  const inner = dims.slice(axis < 0 ? dims.length + axis + 1 : axis + 1).reduce((product, size) => product * size, 1);
  const score = (i, j) => scores[(Math.floor(i / inner) * classes + j) * inner + (i % inner)];
  const best = (i) => [...Array(classes).keys()].reduce((b, j) => (score(i, j) > score(i, b) ? j : b), 0);
  return Array.from(labels, Number).flatMap((label, i) => (label === ignored ? [] : [best(i) === label]));
}
