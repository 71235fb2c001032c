// A visit to a page of a packed folder, as someone with a telephone or without a mouse makes it.
import { createRequire } from 'node:module';
import { visit } from './serve.mjs';

// Called by `node PROGRAM PACKAGES CHROMIUM URL OUT`: opens a page of the site at URL, which must ask for nothing from
// elsewhere, and hands `work` the page, `ready`, which waits until the page can train, `shot`, which leaves a screenshot
// in OUT, and `save`, which saves the weights there.
export async function visitSite(name, height, work) {
  const [, , packages, executable, url, out] = process.argv;
  const { chromium } = createRequire(`${packages}/`)('playwright-core');
  await visit(chromium, executable, false, async (page) => {
    const elsewhere = [];
    page.on('request', (request) => /^(data:|blob:)/.test(request.url()) || request.url().startsWith(`${url}/`) || elsewhere.push(request.url()));
    await page.setViewportSize({ width: 400, height });
    await page.addInitScript(seeded);
    const shot = (what) => page.screenshot({ path: `${out}/${what}.png` });
    await page.exposeFunction('shot', shot);
    await page.goto(`${url}/${name}`);
    const ready = () => page.waitForSelector('#train:not([disabled])', { timeout: 240000 });
    await ready();
    await basics(page);
    const save = async () => {
      const [saved] = await Promise.all([page.waitForEvent('download'), page.click('#save')]);
      await saved.saveAs(`${out}/trained.bin`);
    };
    await work({ page, ready, shot, save });
    if (elsewhere.length) throw new Error(`asked for ${elsewhere}`);
  });
}

// In the page: the same samples are drawn at each visit, and at step 200 a screenshot is left before it goes on.
function seeded() {
  let state = 1;
  Math.random = () => (state = (state * 48271) % 2147483647) / 2147483647;
  const later = globalThis.setTimeout;
  globalThis.setTimeout = (next, ...rest) =>
    document.getElementById('now')?.textContent.startsWith('step 200:') ? globalThis.shot('during').then(next) : later(next, ...rest);
}

// Throws where the page is too wide, has a control without a name, or one that Tab does not reach in its order.
async function basics(page) {
  const { lacks, controls } = await page.evaluate(() => {
    const lacks = [];
    if (document.documentElement.scrollWidth > innerWidth) lacks.push('it is too wide');
    if (!document.documentElement.lang || !document.title || document.querySelectorAll('h1').length !== 1) lacks.push('no language, title or heading');
    if (!document.querySelector('[aria-live]')) lacks.push('what changes is not read out');
    const controls = [...document.querySelectorAll('input, button, canvas, svg')];
    for (const each of controls)
      if (!(each.getAttribute('aria-label') || each.labels?.[0]?.textContent.trim() || (each.tagName === 'BUTTON' && each.textContent.trim())))
        lacks.push(`#${each.id} has no name`);
    return { lacks, controls: controls.filter((each) => each.tabIndex >= 0 && !each.disabled).map((each) => each.id) };
  });
  const reached = [];
  for (const _ of controls) {
    await page.keyboard.press('Tab');
    reached.push(await page.evaluate(() => document.activeElement.id));
  }
  if (String(reached) !== String(controls)) lacks.push(`Tab reaches ${reached} of ${controls}`);
  await page.evaluate(() => document.activeElement.blur());
  if (lacks.length) throw new Error(lacks.join('; '));
}
