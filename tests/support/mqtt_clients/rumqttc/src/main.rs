// The job of tests/support/mqtt_programs.py, done by rumqttc.
use rumqttc::{Client, Event, MqttOptions, Outgoing, Packet, QoS, SubscribeReasonCode};
use std::{collections::HashMap, env, io, sync::mpsc, thread, time::Duration};

fn job(name: &str) -> String {
    env::var(format!("MQTT_{name}")).unwrap()
}

fn main() {
    let (topic, commands) = (job("TOPIC"), job("COMMANDS"));
    let qos = match job("QOS").as_str() {
        "1" => QoS::AtLeastOnce,
        _ => QoS::ExactlyOnce,
    };
    let mut options = MqttOptions::new(job("NAME"), job("HOST"), job("PORT").parse().unwrap());
    options
        .set_credentials(job("NAME"), job("SECRET"))
        .set_clean_session(false);
    let (client, mut connection) = Client::new(options, 10);
    let (publisher, (written, readings)) = (client.clone(), mpsc::channel());
    thread::spawn(move || {
        for reading in io::stdin().lines().map(Result::unwrap) {
            written.send(reading.clone()).unwrap();
            publisher.publish(&topic, qos, false, reading).unwrap();
        }
        std::process::exit(0);
    });
    // Readings by packet identifier, which stays when they are sent again.
    let mut unfinished = HashMap::new();
    for event in connection.iter() {
        match event {
            Err(_) => thread::sleep(Duration::from_millis(200)),
            Ok(Event::Outgoing(Outgoing::Publish(id))) => {
                unfinished
                    .entry(id)
                    .or_insert_with(|| readings.recv().unwrap());
            }
            Ok(Event::Outgoing(_)) => {}
            Ok(Event::Incoming(packet)) => match packet {
                Packet::ConnAck(_) => {
                    println!("connected");
                    if !commands.is_empty() {
                        // This thread makes room in the queue, so it does not wait for it.
                        let (client, commands) = (client.clone(), commands.clone());
                        thread::spawn(move || client.subscribe(commands, qos).unwrap());
                    }
                }
                Packet::SubAck(answer) => match answer.return_codes[0] {
                    SubscribeReasonCode::Success(_) => println!("subscribed"),
                    SubscribeReasonCode::Failure => println!("refused"),
                },
                Packet::PubAck(rumqttc::PubAck { pkid: id })
                | Packet::PubComp(rumqttc::PubComp { pkid: id }) => {
                    if let Some(reading) = unfinished.remove(&id) {
                        println!("acknowledged {reading}");
                    }
                }
                Packet::Publish(message) => {
                    println!("command {}", String::from_utf8_lossy(&message.payload))
                }
                _ => {}
            },
        }
    }
}
