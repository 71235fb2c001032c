// node look.mjs PACKAGES CHROMIUM PAGE OUT: opens a report, leaves pictures of it, wide and narrow, light and dark, and
// prints as JSON what it saw. Anything that the page logs as an error, or asks of the network, ends up in `errors`.
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';
import { visit } from '../web/serve.mjs';

const [, , packages, executable, file, out] = process.argv;
const { chromium } = createRequire(`${packages}/`)('playwright-core');
const seen = { errors: [], overflows: {}, inks: {} };

await visit(chromium, executable, false, async (page) => {
  page.on('request', (request) => request.url().startsWith('file:') || seen.errors.push(request.url()));
  for (const [width, colorScheme] of [[1280, 'light'], [1280, 'dark'], [400, 'light'], [400, 'dark']]) {
    const name = `${width}-${colorScheme}`;
    await page.emulateMedia({ colorScheme });
    await page.setViewportSize({ width, height: 900 });
    const began = performance.now();
    await page.goto(pathToFileURL(file).href);
    await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => setTimeout(done))));
    seen.seconds ??= (performance.now() - began) / 1000;
    await page.screenshot({ path: `${out}/${name}.png` });
    seen.overflows[name] = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
    seen.inks[name] = await page.evaluate(() => getComputedStyle(document.body).color);
  }
  seen.broken = await page.evaluate(() => [...document.querySelectorAll('nav a')].map((a) => a.getAttribute('href'))
    .filter((href) => document.getElementById(decodeURIComponent(href.slice(1))) === null));
  seen.tallest = await page.evaluate(() => Math.max(...[...document.querySelectorAll('.wide')].map((b) => b.clientHeight)));
  await page.locator('nav a').last().focus();
  await page.keyboard.press('Enter');
  seen.went = await page.evaluate(() => location.hash !== '' && scrollY > 0);
  await page.setViewportSize({ width: 1280, height: 900 });
  await page.emulateMedia({ colorScheme: 'light' });
  await page.screenshot({ path: `${out}/whole.png`, fullPage: true });
}, (text) => seen.errors.push(text));
console.log(JSON.stringify(seen));
