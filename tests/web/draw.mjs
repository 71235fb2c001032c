// node draw.mjs PACKAGES CHROMIUM URL OUT: draws a one with the mouse and a minus with the keyboard, which is to be a 7;
// trains and saves; prints what the page tells before and after, and leaves screenshots.
import { visitSite } from './visitor.mjs';

await visitSite('draw.html', 720, async ({ page, ready, shot, save }) => {
  await page.click('#add');
  await page.waitForFunction(() => document.getElementById('now').textContent === 'Draw a digit first.');
  await ready();
  const { x, y, width, height } = await page.locator('#pad').boundingBox();
  await page.mouse.move(x + width / 2, y + height / 16);
  await page.mouse.down();
  await page.mouse.move(x + width / 2, y + (15 * height) / 16, { steps: 20 });
  await page.mouse.up();
  await shot('drawn');
  await page.fill('#digit', '1');
  await page.click('#add');
  await ready();
  await page.focus('#pad');
  for (const key of ['ArrowDown', 'ArrowDown', 'ArrowDown', ' ', 'ArrowLeft', ' ', 'ArrowLeft', ' ']) await page.keyboard.press(key);
  await page.fill('#digit', '7');
  await page.keyboard.press('Enter');
  await ready();
  console.log(await page.textContent('#now'));
  await page.click('#train');
  await page.waitForSelector('#train[disabled]');
  await ready();
  console.log(await page.textContent('#now'));
  await shot('after');
  await save();
});
