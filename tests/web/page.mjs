// node page.mjs PACKAGES CHROMIUM URL OUT: visits the page of a packed folder, trains, saves; prints what it tells before
// and after, and leaves screenshots from before, during and after.
import { visitSite } from './visitor.mjs';

await visitSite('index.html', 640, async ({ page, ready, shot, save }) => {
  console.log(await page.textContent('#now'));
  await shot('before');
  await page.fill('#steps', '800');
  await page.focus('#rate');
  await page.keyboard.press('Enter'); // no mouse is needed
  await page.waitForSelector('#train[disabled]');
  await ready();
  console.log(await page.textContent('#now'));
  await shot('after');
  await save();
});
