// What programs do with npm's `e2b`, against the server that E2B_API_URL and E2B_SANDBOX_URL name: by node's own test runner.

const assert = require('node:assert/strict')
const fs = require('node:fs')
const os = require('node:os')
const path = require('node:path')
const { after, before, test } = require('node:test')
const e2b = require('e2b')
const { Sandbox, Template } = e2b

let sandbox

before(async () => {
  sandbox = await Sandbox.create({ timeoutMs: 120_000, envs: { FOO: 'bar' }, metadata: { test: 'a & b' } })
})
after(() => sandbox.kill())

async function ids(query) {
  return (await Sandbox.list({ query }).nextItems()).map((each) => each.sandboxId)
}

async function until(condition) {
  while (!(await condition())) await new Promise((done) => setTimeout(done, 50))
}

test('a sandbox is found, prolonged and ended', async () => {
  const own = await Sandbox.create('base', { metadata: { test: 'own' } })
  const info = await own.getInfo()
  assert.deepEqual([info.sandboxId, info.templateId, info.metadata], [own.sandboxId, 'base', { test: 'own' }])
  await own.setTimeout(1_000_000)
  assert((await own.getInfo()).endAt - info.endAt > 300_000)
  assert.deepEqual(await ids({ metadata: { test: 'own' } }), [own.sandboxId])
  assert.deepEqual(await ids({ metadata: { test: 'a & b' } }), [sandbox.sandboxId])
  const pages = Sandbox.list({ limit: 1 })
  assert.equal((await pages.nextItems()).length, 1)
  assert(pages.hasNext)
  const handle = await own.commands.run('sleep 60', { background: true })
  assert(await Sandbox.kill(own.sandboxId))
  await assert.rejects(handle.wait(), (error) => !(error instanceof e2b.CommandExitError))
  assert.equal(await own.isRunning(), false)
  assert.equal(await Sandbox.kill(own.sandboxId), false)
  await assert.rejects(own.commands.run('true'), e2b.NotFoundError)
  await assert.rejects(Sandbox.connect(own.sandboxId), e2b.NotFoundError)
  await assert.rejects(Sandbox.create({ apiKey: 'e2b_ff' }), e2b.AuthenticationError)
  await assert.rejects(Sandbox.create('code-interpreter-v1'), /400: template 'code-interpreter-v1'/)
})

test('commands', async () => {
  const { commands } = sandbox
  const seen = []
  const onStdout = (data) => void seen.push(data)
  const result = await commands.run('echo $FOO $X; pwd; echo no >&2', { cwd: '/tmp', envs: { X: '1' }, onStdout })
  assert.deepEqual([result.stdout, result.stderr, result.exitCode], ['bar 1\n/tmp\n', 'no\n', 0])
  assert.equal(seen.join(''), result.stdout)
  await assert.rejects(commands.run('echo out; exit 3'), (error) => {
    assert(error instanceof e2b.CommandExitError)
    assert.deepEqual([error.exitCode, error.stdout, error.error], [3, 'out\n', 'exit status 3'])
    return true
  })
  assert.equal((await commands.run("head -c 3000000 /dev/zero | tr '\\0' x")).stdout.length, 3_000_000)
  await assert.rejects(commands.run('sleep 100', { timeoutMs: 1000 }), e2b.TimeoutError)
  assert.equal((await commands.run('id -un', { user: 'nobody', cwd: '/' })).stdout, 'nobody\n')
})

test('commands in the background', async () => {
  const { commands } = sandbox
  const handle = await commands.run('cat; echo end', { background: true, stdin: true, timeoutMs: 0 })
  const again = await commands.connect(handle.pid)
  await commands.sendStdin(handle.pid, 'a line\n')
  assert.equal((await commands.list()).find(({ pid }) => pid === handle.pid).cmd, '/bin/bash')
  await handle.disconnect()
  await commands.closeStdin(handle.pid)
  assert.equal((await again.wait()).stdout, 'a line\nend\n')
  const sleeping = await commands.run('sleep 60', { background: true })
  assert(await sleeping.kill())
  await assert.rejects(sleeping.wait(), { exitCode: -1, error: 'signal: killed' })
  assert.equal(await commands.kill(sleeping.pid), false)
  await assert.rejects(commands.connect(99_999), e2b.NotFoundError)
})

test('files go in and come out as they were', async () => {
  const { files } = sandbox
  assert.equal((await files.write('new/text.txt', 'zwölf')).path, '/home/user/new/text.txt')
  assert.equal(await files.read('new/text.txt'), 'zwölf')
  const data = Buffer.alloc(3_500_000, 'which is no round number')
  await files.write('data.bin', new Uint8Array(data).buffer)
  assert.deepEqual(Buffer.from(await files.read('data.bin', { format: 'bytes' })), data)
  assert.equal((await files.read('data.bin', { format: 'blob' })).size, data.length)
  let streamed = 0
  for await (const piece of await files.read('data.bin', { format: 'stream' })) streamed += piece.length
  assert.equal(streamed, data.length)
  await files.write('streamed', new Blob(['a', 'b']).stream())
  const many = await files.write([{ path: 'many/a b', data: 'a' }, { path: 'many/c', data: new Blob(['c']) }])
  assert.deepEqual(many.map((each) => each.path), ['/home/user/many/a b', '/home/user/many/c'])
  await files.write('empty', '')
  await files.write('packed', 'abc'.repeat(1000), { gzip: true, useOctetStream: true })
  for (const [name, text] of [['streamed', 'ab'], ['many/a b', 'a'], ['empty', ''], ['packed', 'abc'.repeat(1000)]])
    assert.equal(await files.read(name), text)
  for (const call of [files.read, files.list, files.getInfo])
    await assert.rejects(call.call(files, 'absent'), e2b.NotFoundError)
  await assert.rejects(files.read('many'), e2b.InvalidArgumentError)
})

test('folders', async () => {
  const { files } = sandbox
  assert.deepEqual([await files.makeDir('d/e'), await files.makeDir('d/e')], [true, false])
  const events = []
  const watch = await files.watchDir('d', (event) => void events.push(event.name), { recursive: true })
  await files.write('d/e/f', '12345')
  await until(() => events.includes('e/f'))
  await watch.stop()
  const listed = await files.list('d', { depth: 2 })
  assert.deepEqual(listed.map(({ name, type, size }) => [name, type, type === 'file' ? size : 0]), [
    ['e', 'dir', 0],
    ['f', 'file', 5],
  ])
  assert.equal((await files.rename('d/e/f', 'd/g')).path, '/home/user/d/g')
  assert.deepEqual([await files.exists('d/e/f'), (await files.getInfo('d/g')).owner], [false, 'root'])
  await files.remove('d')
  assert.equal(await files.exists('d'), false)
})

test('a terminal', async () => {
  let screen = ''
  const onData = (data) => void (screen += Buffer.from(data))
  const terminal = await sandbox.pty.create({ cols: 80, rows: 24, envs: { PS1: '' }, onData })
  await sandbox.pty.resize(terminal.pid, { cols: 99, rows: 33 })
  await sandbox.pty.sendInput(terminal.pid, Buffer.from('stty size; exit 3\n'))
  await assert.rejects(terminal.wait(), { exitCode: 3 })
  assert.match(screen, /33 99\r\n/)
  const another = await sandbox.pty.create({ cols: 80, rows: 24, onData() {} })
  assert.deepEqual([await sandbox.pty.kill(another.pid), await sandbox.pty.kill(another.pid)], [true, false])
})

test('a paused sandbox keeps its files', async () => {
  const own = await Sandbox.create({ timeoutMs: 60_000, envs: { FOO: 'own' } })
  await own.files.write('kept', 'kept')
  assert(await own.pause())
  assert.equal(await own.isRunning(), false)
  assert((await ids({ state: ['paused'] })).includes(own.sandboxId))
  const again = await Sandbox.connect(own.sandboxId, { timeoutMs: 60_000 })
  assert.equal(await again.files.read('kept'), 'kept')
  assert.equal((await again.commands.run('echo $FOO')).stdout, 'own\n')
  const snapshot = await again.createSnapshot()
  const kept = [await Sandbox.create(snapshot.snapshotId), ...((await again.fork?.({ count: 2 })) ?? [])] // 2.14.1 has no fork
  await again.kill()
  for (const one of kept) {
    assert.equal(await one.files.read('kept'), 'kept')
    await one.kill()
  }
  assert((await Sandbox.listSnapshots().nextItems()).some((each) => each.snapshotId === snapshot.snapshotId))
  assert(await Sandbox.deleteSnapshot(snapshot.snapshotId))
})

test('templates', async () => {
  const fileContextPath = fs.mkdtempSync(path.join(os.tmpdir(), 'e2b-npm-'))
  fs.writeFileSync(path.join(fileContextPath, 'a.txt'), 'copied')
  const template = Template({ fileContextPath })
    .fromImage('base')
    .setEnvs({ WORD: 'built' })
    .copy('a.txt', '/srv/')
    .setWorkdir('/srv')
    .runCmd('echo $WORD > b.txt')
  const built = await Template.build(template, 'from-npm:v1').finally(() => fs.rmSync(fileContextPath, { recursive: true }))
  const own = await Sandbox.create('from-npm:v1')
  assert.equal((await own.commands.run('cat a.txt b.txt')).stdout, 'copiedbuilt\n')
  await own.kill()
  assert.deepEqual([await Template.exists('from-npm'), await Template.exists('not-there')], [true, false])
  await Template.assignTags('from-npm:v1', ['stable'])
  assert.deepEqual((await Template.getTags(built.templateId)).map((each) => each.tag).sort(), ['stable', 'v1'])
  await assert.rejects(Template.build(Template().fromImage('base').runCmd('exit 3'), 'broken'), e2b.BuildError)
})
