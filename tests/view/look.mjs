// node look.mjs PACKAGES CHROMIUM PAGE OUT [QUERY]: opens a page of `onnxgrad view`, uses it, leaves screenshots, and
// prints as JSON what it saw. Anything that the page logs as an error, or asks of the network, ends up in `errors`.
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';
import { visit } from '../web/serve.mjs';

const [, , packages, executable, file, out, query = 'Relu'] = process.argv;
const { chromium } = createRequire(`${packages}/`)('playwright-core');
const seen = { errors: [] };
const boxes = (page) => page.locator('g.box').count();

await visit(chromium, executable, false, async (page) => {
  page.on('request', (request) => request.url().startsWith('file:') || seen.errors.push(request.url()));
  await page.setViewportSize({ width: 1200, height: 800 });
  const began = performance.now();
  await page.goto(pathToFileURL(file).href);
  await page.waitForSelector('html[data-ready]');
  await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => setTimeout(done))));
  seen.seconds = (performance.now() - began) / 1000;
  seen.first = await boxes(page);
  await page.screenshot({ path: `${out}/wide.png` });

  const transform = () => page.getAttribute('#all', 'transform');
  const before = await transform();
  await page.mouse.move(600, 500);
  await page.mouse.wheel(0, -300);
  const zoomed = await transform();
  await page.focus('#picture');
  await page.keyboard.press('ArrowLeft');
  const panned = await transform();
  await page.keyboard.press('0');
  seen.moves = [before !== zoomed, zoomed !== panned, panned !== await transform()];

  await page.keyboard.press('/');
  await page.keyboard.type(query);
  seen.found = await page.locator('#found button').count();
  await page.keyboard.press('Enter');
  seen.about = await page.textContent('#about');
  seen.chosen = await page.locator('g.i.on').count();
  seen.hot = await page.locator('path.e.hot').count();
  await page.screenshot({ path: `${out}/chosen.png` });
  await page.getByRole('button', { name: 'All that it depends on' }).click();
  seen.before = await page.locator('path.e.hot').count();

  await page.click('#fold');
  seen.folded = await boxes(page);
  const module = page.locator('g.box[aria-expanded=false]').first();
  if (await module.count()) {
    await module.focus();
    await page.keyboard.press('Enter');
    seen.unfolded = await boxes(page);
    await page.keyboard.press('Enter'); // the focus is on the frame now
    seen.foldedAgain = await boxes(page);
  }
  await page.keyboard.press('Escape');
  seen.closed = await page.isHidden('#about');

  await page.emulateMedia({ colorScheme: 'dark' });
  await page.setViewportSize({ width: 400, height: 800 });
  await page.reload();
  await page.waitForSelector('html[data-ready]');
  seen.wide = await page.evaluate(() => document.documentElement.scrollWidth > innerWidth);
  seen.ground = await page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  await page.screenshot({ path: `${out}/narrow.png` });
}, (text) => seen.errors.push(text));
console.log(JSON.stringify(seen));
