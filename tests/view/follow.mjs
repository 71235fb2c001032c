// node follow.mjs PACKAGES CHROMIUM REPORT: follows each link of a report into the picture of the model, and prints as
// JSON where it leads: [text of the link, heading of what is chosen there, path of its module, how many are marked].
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';
import { visit } from '../web/serve.mjs';

const [, , packages, executable, file] = process.argv;
const { chromium } = createRequire(`${packages}/`)('playwright-core');
const seen = { errors: [], places: [] };

await visit(chromium, executable, false, async (page) => {
  await page.goto(pathToFileURL(file).href);
  const links = await page.$$eval('td a', (found) => found.map((link) => [link.textContent, link.href]));
  for (const [text, href] of links) {
    await page.goto(href);
    await page.waitForSelector('html[data-ready]');
    await page.waitForFunction(() => decodeURIComponent(location.hash).length > 1);
    const heading = await page.locator('#about h2').textContent({ timeout: 2000 }).catch(() => '');
    seen.places.push([text, heading, await page.textContent('#about'), await page.locator('g.i.on').count()]);
  }
}, (text) => seen.errors.push(text));
console.log(JSON.stringify(seen));
