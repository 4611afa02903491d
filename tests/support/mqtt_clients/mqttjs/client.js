// The job of tests/support/mqtt_programs.py, done by MQTT.js.
"use strict";
const readline = require("node:readline");
const mqtt = require("mqtt");

const { MQTT_HOST, MQTT_PORT, MQTT_NAME, MQTT_SECRET, MQTT_TOPIC, MQTT_QOS, MQTT_COMMANDS } = process.env;
const qos = Number(MQTT_QOS);
const protocolVersion = Number(process.env.MQTT_LEVEL);
const client = mqtt.connect({
  host: MQTT_HOST,
  port: Number(MQTT_PORT),
  username: MQTT_NAME,
  password: MQTT_SECRET,
  clientId: MQTT_NAME,
  clean: false,
  protocolVersion,
  ...(protocolVersion === 5 && { properties: { sessionExpiryInterval: 3600 } }),
  reconnectPeriod: 200,
});
client.on("connect", () => console.log("connected"));
client.on("error", (error) => {
  // A CONNACK has a number. Connections that fail or break have names, and are made anew.
  if (typeof error.code === "number") console.log(`refused ${error.message}`);
});
client.on("message", (_topic, payload) => console.log(`command ${payload}`));
if (MQTT_COMMANDS) {
  client.subscribe(MQTT_COMMANDS, { qos }, (error) => console.log(error ? `refused ${error.message}` : "subscribed"));
}
// What is published while the last connection's messages are sent again fails if that connection ends. It is not sent.
function publish(reading) {
  client.publish(MQTT_TOPIC, reading, { qos }, (error) => {
    if (!error) console.log(`acknowledged ${reading}`);
    else if (error.message === "Connection closed") setImmediate(publish, reading);
    else console.log(`failed ${error.message}`);
  });
}
readline.createInterface({ input: process.stdin }).on("line", publish).on("close", () => process.exit());
