// Trains a model of `onnxgrad build --weights inputs` in any JavaScript: a page, a worker, Node.

export class Trainer {
  // Opens a training model. `ort` is onnxruntime-web or onnxruntime-node; `read(name)` promises the bytes of a file
  // beside the model; `roles` is the name of its JSON; `how` is what ort.InferenceSession.create takes.
  static async open(ort, read, roles, how) {
    const said = JSON.parse(new TextDecoder().decode(await read(roles)));
    const bytes = new Uint8Array(said.bytes); // what the file of the start leaves out is zero
    bytes.set(await read(said.values));
    return new Trainer(ort, said, await ort.InferenceSession.create(await read(said.model), how), bytes);
  }

  constructor(ort, roles, session, bytes) {
    Object.assign(this, { ort, roles, session, held: {} });
    this.load(bytes);
  }

  // A tensor for one of the model's inputs: int64 takes numbers, too.
  tensor(name, data, dims) {
    const { type, array } = this.roles.inputs[name];
    const numbers = array.startsWith('Big') ? Array.from(data, BigInt) : data;
    return new this.ort.Tensor(type, globalThis[array].from(numbers), dims);
  }

  // Takes a step on a batch, a tensor for each input, and returns the loss before it.
  async step(batch, rate) {
    const { roles, held } = this;
    const next = Object.keys(held).filter((name) => roles.inputs[name].next);
    const feeds = { ...held, ...batch, [roles.learning_rate]: this.tensor(roles.learning_rate, [rate], []) };
    const found = await this.session.run(feeds, [roles.loss, ...next.map((name) => roles.inputs[name].next)]);
    const loss = Number(found[roles.loss].data[0]);
    if (!Number.isFinite(loss)) throw new Error(`the loss is ${loss}: no step was taken`);
    for (const name of next) held[name] = found[roles.inputs[name].next];
    return loss;
  }

  // Weights and state as bytes, which `load` takes and `onnxgrad export FILE.bin --model MODEL` makes a model of.
  save() {
    const bytes = new Uint8Array(this.roles.bytes);
    for (const [name, { data }] of Object.entries(this.held))
      bytes.set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength), this.roles.inputs[name].offset);
    return bytes;
  }

  load(bytes) {
    const { buffer } = new Uint8Array(bytes); // a copy of its own
    for (const [name, { type, array, dims, offset, size }] of Object.entries(this.roles.inputs))
      if (offset !== undefined)
        this.held[name] = new this.ort.Tensor(type, new globalThis[array](buffer, offset, size), dims);
  }
}
