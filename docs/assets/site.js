// Browsers don't read the search index for a page that was opened from a folder, so the search says that it needs a server.
if (location.protocol === "file:") {
  const search = document.querySelector(".md-search");
  const note = document.createElement("small");
  note.textContent = "Search needs a server: python -m http.server in this folder";
  search?.replaceChildren(note);
  document.querySelector('label[for="__search"]')?.remove();
}
